"""What goes over the wire: requests, answers and errors in OpenAI's shapes."""
