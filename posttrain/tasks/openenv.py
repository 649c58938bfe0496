"""Environments of OpenEnv: a server with sessions, remote or on this machine (`openenv:http://127.0.0.1:8000`).

    task = OpenEnv("http://127.0.0.1:8000", action="message", observation="echoed_message")

Needs the package: pip install 'posttrain[openenv]'. Each episode is its own session: start the server with at least as many
(`max_concurrent_envs`) as episodes run at once, prompts x group.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Literal
from urllib.request import urlopen

from posttrain.errors import Count, Whole
from posttrain.tasks._packaged import Packaged, Tally
from posttrain.tasks.base import Generate
from posttrain.trust import active
from posttrain.types import JSON, Problem, Rollout

HEALTH_SECONDS = 10.0
REFUSED = "VALIDATION_ERROR"  # a server's error for an action of another form


@dataclass(frozen=True)
class OpenEnv(Packaged):
    """`action` is the field of an action that gets the text of a turn; with "", a turn is a JSON object, the whole action.
    `observation` is the field that the policy reads; with "", it reads all of them as JSON. `instruction` comes before the
    first. `reset` are arguments of a reset besides its seed; `seeded` says that a seed decides where an episode begins. The
    score is the sum of the rewards, or each turn gets its own (`credit=turn`)."""

    name: ClassVar[str] = "openenv"
    module: ClassVar[str] = "openenv.core"
    shorthand: ClassVar[str] = "url"
    verifiable = False

    url: str  # the address of the environment's server
    action: str = "message"
    observation: str = ""
    instruction: str = ""
    reset: Mapping[str, JSON] = field(default_factory=dict)
    seeded: bool = True
    credit: Literal["end", "turn"] = "end"
    # actions that an episode may have which the server refuses, or which are not JSON
    invalid: Whole = 1
    _: KW_ONLY
    max_turns: Count = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        web = self.url.startswith(("http://", "https://"))
        self.check(web, f"url is http://HOST:PORT, not {self.url!r}")
        active().require_address(self.url)

    @property
    def resettable(self) -> bool:
        return self.seeded

    def ready(self) -> tuple[str, ...]:
        """Check that the server answers. A client has a thread, so none starts before the workers do."""
        self.package()
        try:
            urlopen(f"{self.url.rstrip('/')}/health", timeout=HEALTH_SECONDS).close()
        except OSError as error:
            self.check(False, f"no server answers at {self.url}: {error}")
        return ()

    def begin(self, seed: int) -> Any:
        """Start a session. Its own thread answers the server's pings while the policy samples."""
        client = self.package().GenericEnvClient(base_url=self.url, message_timeout_s=self.seconds)
        return client.sync()

    async def run(self, problem: Problem, generate: Generate) -> Rollout:
        tally = Tally(generate, self.invalid, self.credit == "turn")
        with self.begin(0) as session:
            result = session.reset(seed=int(problem.facts["seed"]), **dict(self.reset))
            text = "\n".join(t for t in (self.instruction, self.shown(result.observation)) if t)
            while not result.done:
                reply = await tally.ask(text)
                try:
                    result = session.step(self.acted(reply.text))
                except (ValueError, RuntimeError) as error:
                    if isinstance(error, RuntimeError) and REFUSED not in str(error):
                        raise  # a failure of the environment
                    tally.invalid()
                    text = f"That is no action: {str(error)[:500]}"
                    continue
                tally.pay(float(result.reward or 0.0))
                text = self.shown(result.observation)
        return generate.rollout(tally.score())

    def acted(self, text: str) -> dict[str, JSON]:
        if self.action:
            return {self.action: text}
        action = json.loads(text)
        if not isinstance(action, dict):
            raise ValueError("an action is a JSON object")
        return action

    def shown(self, observation: Mapping[str, JSON]) -> str:
        if not self.observation:
            kept = {k: v for k, v in observation.items() if k not in ("metadata", "done", "reward")}
            return json.dumps(kept, ensure_ascii=False)
        if self.observation not in observation:
            raise LookupError(f"no field {self.observation}; it has {', '.join(observation)}")
        return str(observation[self.observation])
