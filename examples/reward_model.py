"""A reward model from pairs, and the share of held-out pairs that it orders as people did.

python examples/reward_model.py model=DIR data=pairs.jsonl validation=others.jsonl steps=100
"""

import posttrain as pt

settings = pt.arguments(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    data="trl-lib/ultrafeedback_binarized",
    validation="",  # your own pairs; a tenth of the data is held out in any case
    steps=1000,
    lr=1e-6,
)
validation = settings.pop("validation")
run = pt.reward_model(**settings)
print("accuracy on what was held out, with its interval:", run.result["accuracy"])
if validation:
    print(f"accuracy on {validation}:", run.evaluate(data=validation)["accuracy"])
