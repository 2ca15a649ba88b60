"""What encoder-decoders do beside writing a text token by token."""
