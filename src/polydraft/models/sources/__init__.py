"""What a model reads beside the text that it writes: an encoder's input, or images in its prompt."""
