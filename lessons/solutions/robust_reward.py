"""One answer, in the last line, compared as a whole number, in a response of bounded length. posttrain's `math` reward does more, and
`posttrain probe` tries such hacks on any reward."""

import re


def reward(prompt, response, answer):
    if len(response) > 2000 or response.count("Answer:") != 1:
        return 0.0
    found = re.search(r"^Answer:\s*([-+]?\d+)\.?\s*\Z", response, re.MULTILINE)
    return float(found is not None and int(found.group(1)) == int(answer))
