"""An OpenAI-compatible server: requests that are decoded in turn, round by round."""
