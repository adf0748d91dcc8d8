"""ASD in LightLLM's MTP verification, armed from outside the engine. README.md has seams and launch commands."""
