"""An OpenAI-compatible endpoint on the engine, for `posttrain serve` and for the address that each episode of an outside agent
gets."""
