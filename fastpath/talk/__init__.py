"""Conversations over the engine, for the terminal and the server: worker.py has the model in its thread,
exchange.py makes a request of messages and typed events of its tokens."""
