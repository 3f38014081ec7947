"""The fast engine: the reference's functions in compiled form, and what runs a model with them.

    from fastpath.backend import ops_for
    from fastpath.engine import Engine
    from fastpath.generate import generate
    from fastpath.load import load_model

    model = load_model("model.gguf").packed()
    engine = Engine(model, ops_for("cpu"))
    text = model.tokenizer.stream()
    for token_id in generate(engine, model.tokenizer.encode("Hello", add_bos=True), max_tokens=20):
        print(text.push(token_id), end="", flush=True)
    print(text.flush())

Nothing is imported here, so that `twinpath --help` does not wait for the compiler.
"""
