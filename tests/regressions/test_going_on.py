"""An answer that was cut off and is written on: its kept ids stand for a message that is no longer one."""

from fastpath.load import DEMO, load_model
from refimpl.frontend.splice import Written


def test_the_beginning_of_an_answer_may_be_one_that_was_generated():
    model = load_model(DEMO)
    tokenizer = model.tokenizer
    question = {"role": "user", "content": "What is Twinpath?"}
    begun = {"role": "assistant", "content": "Twinpath is"}
    written = {1: Written(tuple(tokenizer.encode("Twinpath is")))}
    ids = model.template.render_ids(tokenizer, [question, begun], generated=written, continue_final=True)
    assert tokenizer.decode(ids).endswith("What is Twinpath?<turn|>\n<|turn>model\nTwinpath is")
    again = [question, begun, question, begun]  # an earlier answer still has its own ids
    assert (
        model.template.render_ids(tokenizer, again, generated=written, continue_final=True)[: len(ids)] == ids
    )
