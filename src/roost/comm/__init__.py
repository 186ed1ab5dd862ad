"""How workers talk: messages, channels and collectives."""
