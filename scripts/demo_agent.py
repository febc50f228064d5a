"""The program that scripts/demo runs: two questions under one system prompt, then a look at what is left behind."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from looprun_models import LocalModel, local_model

TRUNK = """You are the assistant of the town library of Alder. You answer visitors in one or two short sentences.

What you know about the library:
- It stands at 12 Mill Street, between the town hall and the river, and has two floors and a small garden.
- It is open from Tuesday to Friday from ten in the morning until seven in the evening, on Saturday from ten until four.
  On Sunday and Monday it is closed. It is also closed on public holidays and in the last week of December.
- A library card is free for everybody who lives or studies in Alder. Others pay twelve euros a year. To get a card,
  bring a passport or an identity card to the desk on the ground floor; children under fourteen need a parent with them.
- Up to ten items may be borrowed at once. Books stay for four weeks, magazines and films for one week, games for two.
- A loan can be renewed twice, at the desk, by telephone or on the website, unless another visitor has reserved it.
- Who returns an item late pays twenty cents for each day, at most five euros for each item. Children pay nothing.
- A lost or damaged item is replaced by its borrower with the same or a similar one; the desk helps to choose it.
- Reserving an item is free. A message is sent when it is ready, and it is kept at the desk for seven days.

What is where:
- Ground floor: the desk, newspapers and magazines, new books, children's books, the returns box beside the door.
- First floor: novels, science, history, languages, travel, the music room, six computers and the reading room.
- The music room has a piano. It can be booked for one hour a day, and only with headphones after six in the evening.
- The computers may be used for one hour, or longer when nobody waits. Printing costs ten cents a page.
- The reading room is quiet: no telephones, no food. Water in a closed bottle is allowed. The garden is for eating.
- There is a lift beside the stairs, and the toilets on both floors can be reached with a wheelchair.

What happens:
- Every Wednesday at four a story is read to children from four to eight years; no booking is needed.
- On the first Thursday of each month the reading circle meets at seven; the librarian, Mrs Okafor, leads it.
- On Saturday mornings volunteers help with computers, telephones and forms, from ten until noon, free of charge.
- In summer there are concerts in the garden on Friday evenings; when it rains they take place in the reading room.

How you answer:
- Be friendly and brief. Use plain words and full sentences. Never use lists, headings or emphasis.
- Only say what is written above. When you do not know something, say so, and name the desk as the place to ask.
- Do not give legal, medical or financial advice; say that the library has books about it on the first floor.
- Do not speak about other visitors, about what somebody has borrowed, or about the staff beyond their names.
- When somebody is angry, stay calm, say that you are sorry, and offer to fetch a librarian.
- Answer in the language of the question. Give times in words, and prices in euros and cents.
"""
QUESTIONS = ("What is the capital of France?", "Which planet is the largest?")


class Answer(NamedTuple):
    """ttft: seconds from the request to the first word. timings: what the server measured of itself."""

    text: str
    ttft: float
    timings: dict[str, Any]


def main() -> int:
    if len(sys.argv) == 3 and sys.argv[1] == "--left-behind":
        return report_left_behind(Path(sys.argv[2]))
    started = time.monotonic()
    with local_model("smoke", keep_alive=0) as model:
        note_used(model, Path(os.environ["LOOPRUN_STATE_DIR"]).parent / "used.json")
        print(f"{model.model} is ready at {model.server.base_url} after {time.monotonic() - started:.1f} s")
        answers = [ask(model, question) for question in QUESTIONS]
    print("\n      first word  prompt tokens  of these reused  speed")
    for name, answer in zip(("cold", "warm"), answers, strict=True):
        reused, fresh = answer.timings["cache_n"], answer.timings["prompt_n"]
        speed = answer.timings["predicted_per_second"]
        print(f"{name}  {1000 * answer.ttft:7.0f} ms  {reused + fresh:13}  {reused:15}  {speed:.0f} tokens/s")
    return 0


def ask(model: LocalModel, question: str) -> Answer:
    words: list[str] = []
    timings: dict[str, Any] = {}
    ttft = 0.0
    started = time.monotonic()
    for chunk in model.chat.completions.create(
        model=model.model,
        messages=[{"role": "system", "content": TRUNK}, {"role": "user", "content": question}],
        stream=True,
        **model.pinned(max_tokens=60),
    ):
        timings = (chunk.model_extra or {}).get("timings", timings)
        if chunk.choices and (word := chunk.choices[0].delta.content):
            ttft = ttft or time.monotonic() - started
            words.append(word)
    print(f"\n> {question}\n{''.join(words).strip()}")
    return Answer("".join(words), ttft, timings)


def note_used(model: LocalModel, path: Path) -> None:
    """Write down what this run started, for the look afterwards: another process does that one."""
    server: Any = model.server
    record = server.record
    pids = (record.supervisor_pid, record.child_pid)
    used = {"port": record.port, "processes": [(pid, psutil.Process(pid).create_time()) for pid in pids]}
    path.write_text(json.dumps(used), encoding="utf-8")


def report_left_behind(demo: Path) -> int:
    """Say what still runs or holds the port, after up to ten seconds; 0 when it is nothing."""
    try:
        used = json.loads((demo / "used.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        used = {"port": None, "processes": []}
    deadline = time.monotonic() + 10
    while (left := left_behind(demo, used)) and time.monotonic() < deadline:
        time.sleep(0.1)
    print("\nleft running: " + ("; ".join(left) or f"nothing. The server has ended and port {used['port']} is free."))
    return 1 if left else 0


def left_behind(demo: Path, used: dict[str, Any]) -> list[str]:
    recorded = {pid: created for pid, created in used["processes"]}
    left = []
    for process in psutil.process_iter():
        try:
            places = [process.cwd(), *process.cmdline()[:1]]
            ours = any(place.startswith(f"{demo}{os.sep}") for place in places)
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if ours or recorded.get(process.pid) == process.create_time():
                left.append(f"{process.name()} (pid {process.pid})")
        except psutil.Error:
            continue
    left += [f"{path.name} in the records" for path in (demo / "state" / "servers").glob("*.json")]
    if used["port"] and not is_free(used["port"]):
        left.append(f"something on port {used['port']}")
    return left


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


if __name__ == "__main__":
    sys.exit(main())
