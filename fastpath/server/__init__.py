"""The model behind HTTP: app.py puts it together; openai.py, completions.py, responses.py, anthropic.py and
ollama.py speak to clients, service.py is what they share."""
