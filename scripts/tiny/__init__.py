"""The bundled tiny base model: its data, its training, its export, and the demo that improves it."""
