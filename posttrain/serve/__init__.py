"""An OpenAI-compatible endpoint on the engine: `posttrain serve`, and the address of each episode where an outside agent is trained."""
