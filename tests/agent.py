"""A program that uses a local model as an agent does, driven line by line: `ask` answers, end of input ends it.

usage: agent.py ALIAS [local_model arguments as JSON]
"""

from __future__ import annotations

import json
import os
import sys

from looprun_models import LooprunError, local_model


def main() -> None:
    alias, options = sys.argv[1], json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}")
    try:
        model = local_model(alias, **options)
    except LooprunError as error:
        say(error=type(error).__name__, message=str(error))
        sys.exit(error.exit_code)
    with model:
        record = model.server.record  # type: ignore[attr-defined]
        say(pid=os.getpid(), engine=record.child_pid, supervisor=record.supervisor_pid, port=record.port)
        for _ in sys.stdin:
            reply = model.chat.completions.create(
                model=model.model, messages=[{"role": "user", "content": "hi"}], **model.pinned(max_tokens=20)
            )
            say(text=reply.choices[0].message.content)


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
