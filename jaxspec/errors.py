"""The errors that jaxspec raises on purpose; the command line turns them into one line and an exit status."""


class JaxspecError(ValueError):
    """Something a caller gave does not fit; the message names the values that disagree and what to do."""


class ConfigError(JaxspecError):
    """A model, engine or sampling setting is invalid or not supported."""


class CheckpointError(JaxspecError):
    """A checkpoint is missing, damaged, hostile or does not match its own configuration."""
