"""Between tokens and text: conversations through a chat template, and text as it comes."""
