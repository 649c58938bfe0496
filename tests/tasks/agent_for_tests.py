"""An agent that knows nothing of posttrain: it reads a problem, talks with a server, and does as its arguments say."""

import json
import os
import subprocess
import sys
import time
from http.client import HTTPConnection
from urllib.parse import urlsplit

problem = json.loads(sys.stdin.readline())
place = urlsplit(os.environ["OPENAI_BASE_URL"])
connection = HTTPConnection(place.netloc, timeout=60)
key = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}


def ask(messages, headers=None, path="/chat/completions", **more):  # type: ignore[no-untyped-def]
    body = {"messages": messages, "return_token_ids": True, **more}
    connection.request(
        "POST", place.path + path, json.dumps({k: v for k, v in body.items() if v is not None}), key | (headers or {})
    )
    response = connection.getresponse()
    answer = json.loads(response.read())
    if response.status != 200:
        raise SystemExit(answer["error"]["message"])
    return answer["choices"][0]


messages = list(problem["messages"])
for what in sys.argv[1:]:
    if what == "turn":
        messages += [ask(messages)["message"], {"role": "user", "content": "more"}]
    elif what == "low":  # pays for signs and digits in all that was said, not for letters
        said = "".join(one["content"] or "" for one in messages if one["role"] == "assistant")
        print(sum(letter < "A" for letter in said) / max(1, len(said)))
    elif what == "cut":
        messages += [ask(messages, max_tokens=2)["message"], {"role": "user", "content": "more"}]
    elif what == "same":  # the same question twice: two samples
        assert ask(messages)["token_ids"] and ask(messages)["token_ids"]
    elif what == "retry":
        first, again = ask(messages), ask(messages, {"x-stainless-retry-count": "1"})
        assert first["token_ids"] == again["token_ids"]
        messages += [again["message"], {"role": "user", "content": "more"}]
    elif what == "forget":  # a changed history
        messages = [messages[0], {"role": "assistant", "content": "short"}, messages[-1]]
    elif what == "ids":
        given = ask(None, path="/completions", prompt=[7, 8, 9])["token_ids"]
        ask(None, path="/completions", prompt=[7, 8, 9, *given, 10])
    elif what == "long":
        messages[-1] = {"role": "user", "content": "a" * 3000}
    elif what == "flood":
        while True:
            ask(messages)
    elif what == "crash":
        sys.exit("out of memory")
    elif what == "hang":
        time.sleep(60)
    elif what in ("child", "daemon"):  # a process that keeps the output open
        subprocess.Popen(["sleep", "30"], start_new_session=what == "daemon")
    elif what == "noise":
        print("x" * 1_000_000)
    else:
        print(what)
