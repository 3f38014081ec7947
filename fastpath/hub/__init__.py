"""Models from the Hugging Face Hub: names like hf:OWNER/REPO/FILE, which files belong together, downloads."""
