# ruff: noqa: E501 (a template stays on one line)
"""Grade-school word problems of 2 to 6 steps in the form of GSM8K, told in many wordings.

A family builds a story: sentences of the question, and the steps of its solution. Every step holds its operands and its
value, so an answer is right by construction; the wording of both question and solution is drawn, so that at most places
several continuations are right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from harness.traffic.generated import draw, phrase, sentence, split, split_of

__all__ = ["INSTRUCTION", "Problem", "Step", "problem", "split", "split_of"]

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."

_SHE = ("she", "her", "her")
_HE = ("he", "his", "him")
_NAMES = [
    (name, words)
    for names, words in (
        ("Mia Anna Lily Sofia Emma Nora Ruth Clara Tina Grace Janet Wendy Carla Maria Betty Alice", _SHE),
        ("Tom Ben Sam Leo Jack Omar Paul Ravi James Carlos Eric Kyle Mark Peter Josh Daniel", _HE),
    )
    for name in names.split()
]  # fmt: skip
_THINGS = [tuple(pair.split("/")) for pair in ["apple/apples", "orange/oranges", "pear/pears", "marble/marbles", "sticker/stickers", "stamp/stamps", "shell/shells", "card/cards", "coin/coins", "button/buttons", "bead/beads", "pencil/pencils", "balloon/balloons", "cookie/cookies", "muffin/muffins", "candle/candles", "egg/eggs", "toy/toys", "ribbon/ribbons", "flower/flowers"]]  # fmt: skip
_GOODS = [tuple(pair.split("/")) for pair in ["pen/pens", "notebook/notebooks", "shirt/shirts", "hat/hats", "book/books", "ticket/tickets", "cake/cakes", "sandwich/sandwiches", "plant/plants", "mug/mugs", "scarf/scarves", "lamp/lamps", "ball/balls", "puzzle/puzzles", "poster/posters"]]  # fmt: skip
_FRACTIONS = ((1, 2, "half"), (1, 3, "a third"), (1, 4, "a quarter"), (1, 5, "a fifth"), (2, 3, "two thirds"),
              (3, 4, "three quarters"), (2, 5, "two fifths"))  # fmt: skip
_PERCENTS = (10, 20, 25, 30, 40, 50, 60, 75, 80)
_TIMES = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}


@dataclass(frozen=True)
class Step:
    """One computation: `forms` are the ways to write it, each equal to `value`; `says` is a template with {e} = `form = value`.

    Neighbours of one `group` may be told in any order.
    """

    forms: tuple[str, ...]
    value: int
    says: str
    values: tuple[tuple[str, Any], ...]
    group: int | None = None


@dataclass(frozen=True)
class Problem:
    """question: the story; answer: what \\boxed{} must hold, a whole number."""

    seed: int
    family: str
    question: str
    answer: str
    steps: tuple[Step, ...]
    unit: str
    thinking: bool = False

    @property
    def novelty(self) -> str:
        return self.question

    @property
    def prompt(self) -> str:
        return f"{self.question}\n{INSTRUCTION}"

    @property
    def messages(self) -> tuple[dict[str, str], ...]:
        return ({"role": "user", "content": self.prompt},)

    def solution(self, rng: Random) -> str:
        """One wording of a right solution, ending in the boxed answer."""
        lines = []
        opening = phrase(
            "[||||Let's work [through this|it out|this out] step by step.|We [can |]solve this [one step at a time|in steps].]",
            rng,
            {},
        )
        if opening:
            lines.append(opening)
        steps = _reordered(self.steps, rng)
        for index, step in enumerate(steps):
            form = step.forms[int(rng.random() * len(step.forms))]
            values = dict(step.values, e=f"{form} = {step.value}", v=step.value)
            body = phrase(step.says, rng, values)
            if index == 0:
                lead = phrase("[|||First, |To [begin|start], ]", rng, {})
            elif index == len(steps) - 1:
                lead = phrase("[||So |Finally, |In the end, |Therefore, ]", rng, {})
            else:
                lead = phrase("[|||Then |Next, |After that, |Now ]", rng, {})
            text = lead + body
            lines.append(text[:1].upper() + text[1:])
        tail = "" if self.unit in ("", "$") else f" {self.unit}"
        lines.append(
            phrase("[So the|The|Therefore, the|Thus, the|The final] answer is {boxed}{tail}.", rng,
                   {"boxed": f"\\boxed{{{self.answer}}}", "tail": tail if rng.random() < 0.4 else ""})
        )  # fmt: skip
        return "\n".join(lines) if rng.random() < 0.7 else " ".join(lines)


def _reordered(steps: tuple[Step, ...], rng: Random) -> list[Step]:
    out: list[Step] = []
    run: list[Step] = []
    for step in (*steps, None):
        if run and (step is None or step.group is None or step.group != run[0].group):
            rng.shuffle(run)
            out += run
            run = []
        if step is not None and step.group is not None:
            run.append(step)
        elif step is not None:
            out.append(step)
    return out


class _Story:
    """Collects the sentences and steps of one problem."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.text: list[str] = []
        self.steps: list[Step] = []
        self.values: dict[str, Any] = {}
        name, (they, their, them) = rng.choice(_NAMES)
        self.bind(name=name, they=they, their=their, them=them)

    def bind(self, **values: Any) -> None:
        self.values.update(values)

    def choose(self, pool: list[Any] | tuple[Any, ...] | range) -> Any:
        return pool[int(self.rng.random() * len(pool))]

    def between(self, low: int, high: int) -> int:
        return low + int(self.rng.random() * (high - low + 1))

    def tell(self, template: str, /, **values: Any) -> None:
        text = sentence(template, self.rng, {**self.values, **values})
        if text:
            self.text.append(text)

    def step(self, forms: tuple[str, ...], value: int, says: str, /, group: int | None = None, **values: Any) -> int:
        self.steps.append(Step(forms, value, says, tuple({**self.values, **values}.items()), group))
        return value

    def add(self, a: int, b: int, says: str, /, **values: Any) -> int:
        return self.step((f"{a} + {b}", f"{a} + {b}", f"{b} + {a}"), a + b, says, **values)

    def sub(self, a: int, b: int, says: str, /, **values: Any) -> int:
        return self.step((f"{a} - {b}",), a - b, says, **values)

    def mul(self, a: int, b: int, says: str, /, **values: Any) -> int:
        return self.step((f"{a} * {b}", f"{b} * {a}"), a * b, says, **values)

    def div(self, a: int, b: int, says: str, /, **values: Any) -> int:
        return self.step((f"{a} / {b}",), a // b, says, **values)

    def percent(self, p: int, a: int, says: str, /, **values: Any) -> int:
        return self.step((f"{p}% of {a}", f"{a} * {p} / 100", f"{p} / 100 * {a}"), a * p // 100, says, **values)

    def fraction(self, top: int, bottom: int, a: int, says: str, /, **values: Any) -> int:
        forms = (
            (f"{a} / {bottom}", f"1/{bottom} of {a}")
            if top == 1
            else (f"{top}/{bottom} of {a}", f"{a} * {top} / {bottom}")
        )
        return self.step(forms, a * top // bottom, says, **values)

    def made(self, family: str, answer: int, unit: str) -> Problem:
        return Problem(0, family, " ".join(self.text), str(answer), tuple(self.steps), unit)


def _friend(story: _Story) -> str:
    while True:
        name = story.choose(_NAMES)[0]
        if name not in story.values.values():
            return str(name)


def _parts(n: int) -> list[tuple[int, int, str]]:
    return [f for f in _FRACTIONS if n % f[1] == 0 and n > f[1]]


def _rates(n: int) -> list[int]:
    return [p for p in _PERCENTS if n * p % 100 == 0]


_LEFT = (
    "[{name}|{they}] [[now |then |]has|is left with] {e} {items}[ left|].|{e} {items} [are left|remain|are still there].|"
    "that leaves [{name}|{them}] [with |]{e} {items}.|the number of {items} [left|now] is {e}."
)
_NOW = (
    "[{name}|{they}] [now |then |]has {e} {items}[ in total| altogether|].|that [makes|gives] {e} {items}.|"
    "the [total|number of {items}] is now {e}.|{their} {items} [come to|add up to] {e}."
)


def _event(s: _Story, n: int) -> int:
    """One thing that happens to n items: returns how many there are then, or n itself when nothing fitted."""
    kind = s.choose(("buy", "give", "packs", "part", "percent", "double", "lose", "share"))
    if kind == "buy":
        k = s.between(4, 85)
        s.tell(
            "[Then |Later, |The next day, |After that, |][{name}|{they}] [buys|finds|gets|collects|is given] {k} [more|more {items}|additional {items}].",
            k=k,
        )
        return s.add(n, k, _NOW, k=k)
    if kind in ("give", "lose") and n > 12:
        k = s.between(3, n - 5)
        if kind == "give":
            s.tell(
                "[Then |Later, |After that, |][{name}|{they}] [gives|hands|sends] {k} [of them|{items}] to [{their} [brother|sister|neighbor|cousin|best friend]|a friend].",
                k=k,
            )
        else:
            s.tell(
                "[Unfortunately, |Sadly, |One day, |]{k} [of them|of the {items}] [get lost|break|are stolen|fall into a river].",
                k=k,
            )
        return s.sub(n, k, _LEFT, k=k)
    if kind == "packs":
        m, k = s.between(2, 9), s.between(3, 15)
        s.tell(
            "[{name}|{they}] [also |then |][buys|gets|receives] {m} [packs|boxes|bags] [of|with] {k} {items}[ each| in each|].",
            m=m,
            k=k,
        )
        extra = s.mul(
            m,
            k,
            "the [packs|new ones|boxes] [hold|contain|add] {e} {items}.|[{name}|{they}] [buys|gets] {e} [more|new] {items}.|[there are|that is] {e} {items} in the [packs|boxes|bags].",
        )
        return s.add(n, extra, _NOW)
    if kind == "part" and _parts(n):
        top, bottom, word = s.choose(_parts(n))
        s.tell(
            "[{name}|{they}] [gives away|sells|uses up|donates] {word} of [the {items}|{their} {items}|them|what {they} has].",
            word=word,
        )
        gone = s.fraction(
            top,
            bottom,
            n,
            "[{name}|{they}] [gives away|parts with|loses] {e} {items}.|{word} of {n} is {e}[ {items}|].|the {items} that [are gone|leave] number {e}.",
            n=n,
            word=word,
        )
        return s.sub(n, gone, _LEFT)
    if kind == "percent" and _rates(n):
        p = s.choose(_rates(n))
        s.tell(
            "[It turns out that |Later, |][{p}%|{p} percent] of [the {items}|them] [are broken, so [{name}|{they}] throws them away|are given to charity|are sold to a neighbor].",
            p=p,
        )
        gone = s.percent(
            p,
            n,
            "[{p}%|{p} percent] of {n} is {e}[ {items}|].|[{name}|{they}] [gets rid of|loses|parts with] {e} {items}.|{e} {items} are gone.",
            p=p,
            n=n,
        )
        return s.sub(n, gone, _LEFT)
    if kind == "double" and n < 250:
        k = s.choose((2, 2, 3))
        s.tell(
            "[Over the next [week|month|year]|By the end of the [week|month]|Within a [week|month]], the [number|count] of {items} {name} has [{verb}].",
            verb={2: "doubles", 3: "triples"}[k],
        )
        return s.mul(n, k, _NOW)
    if kind == "share" and n % 2 == 0 and n > 8:
        s.tell(
            "[{name}|{they}] [splits|shares] [the {items}|them|everything] [equally|evenly] with {friend}, [so each of them keeps half|each keeping half].",
            friend=_friend(s),
        )
        return s.div(
            n,
            2,
            "[{name}|{they}] [keeps|has] {e} {items}[ after sharing|].|half of the {items} is {e}.|[sharing|splitting] leaves [{name}|{them}] with {e} {items}.",
        )
    return n


def _inventory(s: _Story) -> Problem:
    thing, things = s.choose(_THINGS)
    n = s.between(12, 180)
    s.bind(item=thing, items=things, start=n)
    s.tell(
        "{name} [has|owns|starts with|begins with|collected|has a [box|bag|jar|basket] [of|with]] {start} {items}[| at home| in {their} room| on {their} shelf]."
    )
    events = s.between(2, 4)
    while events:
        after = _event(s, n)
        events -= after != n
        n = after
    end = s.choose(("left", "left", "sell", "bags"))
    if end == "sell" and n > 0:
        price = s.between(2, 9)
        s.tell(
            "[Then |In the end, |Finally, |][{name}|{they}] [sells|decides to sell] [all of them|every {item}|all the {items}] [for|at] ${price} [each|apiece|per {item}].",
            price=price,
        )
        s.tell(
            "How much [money |][does {name} [make|earn|get]|will {name} [make|earn|get]|did {name} [make|earn]][ in dollars| from the sale|]?"
        )
        n = s.mul(
            n,
            price,
            "[{name}|{they}] [earns|makes|gets] {e} dollars[ from the sale|].|the {items} [sell for|bring in] {e} dollars.|[the|{their}] [money|income] is {e} dollars.",
        )
        return s.made("inventory", n, "$")
    sizes = [k for k in range(2, 13) if n % k == 0 and n > k]
    if end == "bags" and sizes:
        k = s.choose(sizes)
        s.tell(
            "[{name}|{they}] [puts|packs|places] [the {items}|them|all of them] [into|in] [bags|boxes|bowls] of {k}[ each|].",
            k=k,
        )
        s.tell("How many [bags|boxes|groups|full ones] does [{name}|{they}] [need|fill|end up with]?")
        n = s.div(
            n,
            k,
            "[{name}|{they}] [needs|fills] {e} [bags|boxes|of them].|[the number of|we need] [bags|boxes] is {e}.|[dividing|packing] them gives {e} [bags|groups].",
        )
        return s.made("inventory", n, "")
    s.tell("How many {items} does {name} have [now|left|in the end|at the end]?")
    return s.made("inventory", n, things)


def _shopping(s: _Story) -> Problem:
    kinds = s.between(2, 3)
    goods = s.rng.sample(_GOODS, kinds)
    place = s.choose(("shop", "store", "market", "mall", "fair"))
    s.tell(
        "{name} [goes to|visits|stops at|is at] the {place}[| with {their} family| after school| on Saturday].",
        place=place,
    )
    prices = []
    for index, (one, many) in enumerate(goods):
        count, price = s.between(2, 14), s.between(3, 42)
        s.tell(
            "[{name}|{they}] [buys|gets|picks|also buys|takes] {count} {many} [at|for|that cost] ${price} [each|apiece|per {one}].|{many} cost ${price} [each|apiece], and [{name}|{they}] [buys|gets|takes] {count}[ of them|].",
            count=count,
            price=price,
            one=one,
            many=many,
        )
        prices.append(
            s.mul(
                count,
                price,
                "the {many} cost {e} dollars[ in total|].|[{name}|{they}] [pays|spends] {e} dollars [for|on] [the |]{many}.|the [price|cost] of the {many} is {e} dollars.|for the {many}, [{name} pays|that is] {e} dollars.",
                group=0,
                many=many,
                index=index,
            )
        )
    total = prices[0]
    for price in prices[1:]:
        total = s.add(
            total,
            price,
            "[together|in total], [the cost|that] is {e} dollars.|the [total|bill|sum] [is|comes to] {e} dollars.|[adding|that makes] {e} dollars[ altogether|].",
        )
    if s.rng.random() < 0.45:
        cut = [p for p in _rates(total) if p <= 50]
        if cut and s.rng.random() < 0.6:
            p = s.choose(cut)
            s.tell(
                "[The {place} [gives|offers] {them} a {p}% discount|{they} has a coupon for {p}% off|there is a sale with {p}% off][ the total| everything| the whole bill|].",
                p=p,
                place=place,
            )
            off = s.percent(
                p,
                total,
                "the discount is {e} dollars.|[{p}%|{p} percent] off [is|means] {e} dollars[ less|].|[{name}|{they}] saves {e} dollars.",
                p=p,
            )
        else:
            off = s.between(2, max(2, min(20, total // 3)))
            s.tell(
                "[{they} has|{name} uses|the clerk gives {them}] a [coupon|voucher|gift card] [worth|for] ${off}.",
                off=off,
            )
        total = s.sub(
            total,
            off,
            "[after the discount, |with the discount, |]the [bill|price|cost|total] [is|becomes|drops to] {e} dollars.|[{name}|{they}] [has to pay|pays|owes] {e} dollars.|[that leaves|taking it off gives] {e} dollars.",
        )
    end = s.choose(("total", "change", "change", "split"))
    if end == "change":
        bill = next(b for b in (20, 50, 100, 200, 500, 1000, 2000, 5000) if b > total)
        s.tell(
            "[{name}|{they}] [pays|hands over|gives the clerk|pays with] [${bill}|a total of ${bill}|${bill} in cash].",
            bill=bill,
        )
        s.tell(
            "How much [change|money] [does {name} get back|is returned to {name}|will {they} get back|should {they} receive][ in dollars|]?"
        )
        total = s.sub(
            bill,
            total,
            "[{name}|{they}] [gets|receives] {e} dollars [back|in change|of change].|the change is {e} dollars.|[there are|that leaves] {e} dollars of change.",
        )
    elif end == "split" and [k for k in range(2, 7) if total % k == 0]:
        k = s.choose([k for k in range(2, 7) if total % k == 0])
        s.tell(
            "[{name}|{they}] [splits|shares] the [bill|cost] [equally |evenly |]with {k} [friends|others|people].|The [bill|cost] is [split|shared] [equally|evenly] [among|between] {name} and {k} [friends|others].",
            k=k - 1,
        )
        s.tell("How much does each [person|of them] [pay|owe][ in dollars|]?")
        total = s.div(
            total,
            k,
            "[each|everyone|each person] pays {e} dollars.|[the cost|a share] [per|for each] person is {e} dollars.|[split {k} ways, that is|dividing by {k} gives] {e} dollars[ each|].",
            k=k,
        )
    else:
        s.tell("How much does [{name}|{they}] [pay|spend][ in total| altogether|][ in dollars|]?")
    return s.made("shopping", total, "$")


def _earnings(s: _Story) -> Problem:
    wage, hours, days = s.between(8, 38), s.between(2, 9), s.between(2, 7)
    job = s.choose(
        ("in a cafe", "at a farm", "as a painter", "in a library", "as a tutor", "at a garage", "in a bakery")
    )
    s.tell("{name} [works|has a job] {job}[| during the summer| on weekends| after school].", job=job)
    s.tell("[{they} [earns|makes|is paid]|The job pays] ${wage} [an hour|per hour|for every hour].", wage=wage)
    s.tell(
        "[This week|Last week|In one week|This month], [{name}|{they}] [works|worked] {hours} hours [a day|per day|each day] [for|on] {days} days.",
        hours=hours,
        days=days,
    )
    if s.rng.random() < 0.5:
        time = s.mul(
            hours,
            days,
            "[{name}|{they}] works {e} hours[ in total|].|the hours [worked |]are {e}.|that is {e} hours[ of work|].",
        )
        total = s.mul(
            time,
            wage,
            "[{name}|{they}] [earns|makes|is paid] {e} dollars.|the [pay|wage|income] is {e} dollars.|[this|that] [pays|brings in] {e} dollars.",
        )
    else:
        day = s.mul(
            wage,
            hours,
            "[{name}|{they}] [earns|makes] {e} dollars [a|per|each] day.|one day [pays|brings in] {e} dollars.|the daily pay is {e} dollars.",
        )
        total = s.mul(
            day,
            days,
            "in {days} days, [{name}|{they}] [earns|makes] {e} dollars.|the [pay|income] for {days} days is {e} dollars.|[that is|all days bring in] {e} dollars.",
            days=days,
        )
    if s.rng.random() < 0.5:
        tips = s.between(5, 90)
        s.tell(
            "[{name}|{they}] [also |]gets [${tips} in tips|a bonus of ${tips}|${tips} from a [happy |]customer].",
            tips=tips,
        )
        total = s.add(
            total,
            tips,
            "[with the extra money, |with that, |]{name} has {e} dollars.|[adding the extra|the total is then] {e} dollars.|that [makes|brings it to] {e} dollars.",
        )
    if s.rng.random() < 0.6 and _parts(total):
        top, bottom, word = s.choose(_parts(total))
        s.tell(
            "[{name}|{they}] [spends|uses|pays] {word} of [the money|it|{their} pay] [on|for] [rent|food|a gift|clothes|books].",
            word=word,
        )
        gone = s.fraction(
            top,
            bottom,
            total,
            "[{name}|{they}] [spends|pays] {e} dollars.|{word} of {n} is {e}[ dollars|].|the [cost|spending] is {e} dollars.",
            n=total,
            word=word,
        )
        total = s.sub(
            total, gone, "[that leaves|{they} keeps|{name} has] {e} dollars[ left|].|{e} dollars [remain|are left]."
        )
    elif total > 40:
        cost = s.between(8, total - 20)
        s.tell(
            "[Then |After that, |][{name}|{they}] [spends|pays] ${cost} [on|for] [rent|food|a gift|shoes|a bike|the bus].",
            cost=cost,
        )
        total = s.sub(
            total, cost, "[that leaves|{they} keeps|{name} has] {e} dollars[ left|].|{e} dollars [remain|are left]."
        )
    s.tell(
        "How much money does {name} have [left|now|in the end][ in dollars|]?|How many dollars does {name} have [left|now|in the end]?"
    )
    return s.made("earnings", total, "$")


def _compare(s: _Story) -> Problem:
    _, things = s.choose(_THINGS)
    s.bind(items=things)
    people, counts = [s.values["name"]], [s.between(6, 60)]
    s.tell("{name} has {n} {items}[| in {their} collection| at home].", n=counts[0])
    for _ in range(s.between(2, 3)):
        while True:
            other = s.choose(_NAMES)[0]
            if other not in people:
                break
        ref = s.between(max(0, len(people) - 2), len(people) - 1)
        base, who = counts[ref], people[ref]
        relation = s.choose(("more", "fewer", "times", "part", "percent"))
        said = "{other} has {e} {items}.|the number of {items} {other} has is {e}.|that means {other} has {e} {items}.|{other} [owns|holds] {e} {items}."
        if relation == "more":
            k = s.between(3, 48)
            s.tell(
                "{other} has {k} more {items} than {who}[ does|].|{other} has {k} more than {who}[ does|].",
                other=other,
                k=k,
                who=who,
            )
            n = s.add(base, k, said, other=other)
        elif relation == "times" and base < 130:
            k = s.between(2, 5)
            s.tell("{other} has {times} as many [{items} |]as {who}[ does|].", other=other, times=_TIMES[k], who=who)
            n = s.mul(base, k, said, other=other)
        elif relation == "part" and _parts(base):
            top, bottom, word = s.choose(_parts(base))
            s.tell("{other} has {word} as many [{items} |]as {who}[ does|].", other=other, word=word, who=who)
            n = s.fraction(top, bottom, base, said, other=other)
        elif relation == "percent" and _rates(base):
            p = s.choose(_rates(base))
            s.tell(
                "{other} has [{p}%|{p} percent] as many [{items} |]as {who}[ does|].|The number of {items} {other} has is [{p}%|{p} percent] of what {who} has.",
                other=other,
                p=p,
                who=who,
            )
            n = s.percent(p, base, said, other=other)
        elif base > 9:
            k = s.between(2, base - 4)
            s.tell("{other} has {k} [fewer|less] [{items} |]than {who}[ does|].", other=other, k=k, who=who)
            n = s.sub(base, k, said, other=other)
        else:
            k = s.between(3, 40)
            s.tell("{other} has {k} more {items} than {who}[ does|].", other=other, k=k, who=who)
            n = s.add(base, k, said, other=other)
        people.append(other)
        counts.append(n)
    low, high = sorted((counts[0], counts[-1]))
    if s.rng.random() < 0.35 and low != high:
        first, last = (people[0], people[-1]) if counts[0] > counts[-1] else (people[-1], people[0])
        s.tell("How many more {items} does {first} have than {last}?", first=first, last=last)
        answer = s.sub(
            high,
            low,
            "the difference [between them |]is {e}[ {items}|].|{first} has {e} more[ {items}|][ than {last}|].|[comparing|subtracting], we get {e}[ {items}|].",
            first=first,
            last=last,
        )
    else:
        s.tell("How many {items} do they [all |]have [in total|altogether|together|in all]?")
        answer = counts[0]
        for n in counts[1:]:
            answer = s.add(
                answer,
                n,
                "[together|in total|adding them], [they have|that is|there are] {e} {items}.|the [sum|total][ so far|] is {e}.|[the sum is|that makes] {e}[ {items}|].",
            )
    return s.made("compare", answer, things)


def _travel(s: _Story) -> Problem:
    unit = s.choose(("miles", "kilometers"))
    way = s.choose(("drives", "rides", "travels", "cycles"))
    s.bind(unit=unit, way=way)
    s.tell("{name} [is on a [long |]trip|goes on a trip|plans a trip|sets off][| to see {their} family| to the coast].")
    legs = []
    for index in range(s.between(2, 3)):
        speed, hours = s.between(12, 95), s.between(2, 8)
        s.tell(
            ("[At first|First], " if index == 0 else "[Then|After that|Later], ")
            + "[{name}|{they}] {way} [for {hours} hours at {speed} {unit} per hour|at {speed} {unit} per hour for {hours} hours|at a speed of {speed} {unit} per hour for {hours} hours].",
            speed=speed,
            hours=hours,
        )
        legs.append(
            s.mul(
                speed,
                hours,
                "[the {which} part|part {number}] is {e} {unit}[ long|].|[in|on] the {which} part, [{name}|{they}] [covers|{way}] {e} {unit}.|the distance of the {which} part is {e} {unit}.",
                group=0,
                which=("first", "second", "third")[index],
                number=index + 1,
            )
        )
    total = legs[0]
    for leg in legs[1:]:
        total = s.add(
            total,
            leg,
            "[together|in total|so far], [that is|{name} {way}|it is] {e} {unit}.|the [total|sum|distance] is {e}[ {unit}|].|[adding them up gives|that makes] {e} {unit}.",
        )
    end = s.choose(("total", "left", "fuel"))
    if end == "left":
        whole = total + s.between(15, 240)
        s.tell("The [whole trip|entire trip|road|trip] is {whole} {unit}[ long|].", whole=whole)
        s.tell("How many {unit} [are left|remain|does {name} still have to go]?")
        total = s.sub(
            whole,
            total,
            "[there are|that leaves] {e} {unit}[ to go| left|].|{e} {unit} [remain|are left].|the rest [of the trip |]is {e} {unit}.",
        )
        return s.made("travel", total, unit)
    rates = [k for k in range(4, 31) if total % k == 0]
    if end == "fuel" and rates:
        k = s.choose(rates)
        price = s.between(2, 6)
        s.tell(
            "The [car|van|motorbike] [goes|can go|gets] {k} {unit} [on|per] [one |a |]liter of fuel[, and a liter costs ${price}|, which costs ${price} per liter].",
            k=k,
            price=price,
        )
        s.tell("How much does [the fuel|fuel for the trip|the trip] cost[ in dollars|]?")
        liters = s.div(
            total,
            k,
            "[the trip|this] [needs|takes|uses] {e} liters.|the fuel [needed |]is {e} liters.|[{name}|{they}] uses {e} liters[ of fuel|].",
        )
        return s.made(
            "travel",
            s.mul(
                liters,
                price,
                "[the fuel|it|that] costs {e} dollars.|the [cost|price] is {e} dollars.|[{name}|{they}] pays {e} dollars.",
            ),
            "$",
        )
    s.tell("How [far does {name} travel|many {unit} does {name} travel] [in total|altogether|in all]?")
    return s.made("travel", total, unit)


def _groups(s: _Story) -> Problem:
    place, people = s.choose(
        (
            ("school", "students"),
            ("club", "members"),
            ("camp", "children"),
            ("company", "workers"),
            ("choir", "singers"),
        )
    )
    s.bind(place=place, people=people)
    n = s.choose([n for n in range(40, 601) if n % 20 == 0 or n % 12 == 0])
    rows = [k for k in range(4, 31) if n % k == 0 and 4 <= n // k <= 40]
    if rows and s.rng.random() < 0.5:
        k = s.choose(rows)
        s.tell(
            "[A|The] {place} has {k} [groups|teams|classes] [of|with] {size} {people}[ each| in each|].",
            k=k,
            size=n // k,
        )
        n = s.mul(
            k,
            n // k,
            "the {place} has {e} {people}.|[there are|that is] {e} {people}[ in the {place}|][ in total|].|the number of {people} is {e}.",
        )
    else:
        s.tell("[There are {n} {people} in [a|the] {place}|[A|The] {place} has {n} {people}].", n=n)
    what = s.rng.sample(
        [
            "play chess",
            "play football",
            "learn the piano",
            "speak Spanish",
            "like painting",
            "take the bus",
            "wear glasses",
            "sing",
        ],
        3,
    )
    rest = n
    for index in range(s.between(1, 2)):
        if s.rng.random() < 0.5 and _rates(rest):
            p = s.choose(_rates(rest))
            s.tell(
                ("" if index == 0 else "Of the [rest|others|remaining {people}], ")
                + "[{p}%|{p} percent] "
                + ("of the {people} " if index == 0 else "")
                + "{what}.",
                p=p,
                what=what[index],
            )
            k = s.percent(
                p,
                rest,
                "{e} {people} {what}.|the number [of {people} |]who {what} is {e}.|[{p}%|{p} percent] of {rest} is {e}.",
                p=p,
                rest=rest,
                what=what[index],
            )
        elif _parts(rest):
            top, bottom, word = s.choose(_parts(rest))
            s.tell(
                ("" if index == 0 else "Of the [rest|others|remaining {people}], ")
                + "{word} "
                + ("of the {people} " if index == 0 else "")
                + "{what}.",
                word=word,
                what=what[index],
            )
            k = s.fraction(
                top,
                bottom,
                rest,
                "{e} {people} {what}.|the number [of {people} |]who {what} is {e}.|{word} of {rest} is {e}.",
                word=word,
                rest=rest,
                what=what[index],
            )
        else:
            k = s.between(5, rest - 4)
            s.tell(
                "{k} of [the rest|the others|those left] {what}." if index else "{k} of the {people} {what}.",
                k=k,
                what=what[index],
            )
            s.bind(what=what[index])
        rest = s.sub(
            rest,
            k,
            "[there are|that leaves] {e} [others|other {people}|{people}].|{e} {people} [do not|are left].|the rest [are|is] {e}[ {people}|].",
        )
        if rest < 12:
            break
    if s.rng.random() < 0.5 and rest > 10:
        k = s.between(3, rest - 3)
        s.tell(
            "{k} of [the rest|the others|those left] {what}[, and all others do nothing of this|].", k=k, what=what[2]
        )
        s.tell("How many {people} [do none of these|do nothing of this|are not counted anywhere]?")
        rest = s.sub(
            rest,
            k,
            "[there are|that leaves] {e} {people}[ who do nothing|].|{e} {people} [are left|remain].|the number [left |]is {e}.",
        )
        return s.made("groups", rest, people)
    fee = s.between(2, 12)
    s.tell("[The rest|All others|Everyone else] [pay|pays|has to pay] a fee of ${fee}[ each|].", fee=fee)
    s.tell("How much money does the {place} [collect|get|receive][ in dollars|]?")
    return s.made(
        "groups",
        s.mul(
            rest,
            fee,
            "the {place} [collects|gets|receives] {e} dollars.|the [fees|payments] [add up to|come to] {e} dollars.|[the money|that] is {e} dollars.",
        ),
        "$",
    )


def _bakery(s: _Story) -> Problem:
    good, goods = s.choose(
        (
            ("cookie", "cookies"),
            ("muffin", "muffins"),
            ("roll", "rolls"),
            ("pie", "pies"),
            ("bun", "buns"),
            ("tart", "tarts"),
        )
    )
    s.bind(good=good, goods=goods)
    trays, each, days = s.between(2, 9), s.choose((6, 8, 9, 10, 12, 14, 15, 16, 18, 20, 24)), s.between(2, 6)
    s.tell(
        "{name} [bakes|makes] {trays} trays of {goods} [every day|a day|each day].|[Every|Each] day {name} [bakes|makes] {trays} trays of {goods}.",
        trays=trays,
    )
    s.tell("[Each|Every|One] tray [holds|has|contains] {each} {goods}.", each=each)
    daily = s.mul(
        trays,
        each,
        "[{name}|{they}] [bakes|makes] {e} {goods} [a|per|each|every] day.|[the trays hold|one day gives|that is] {e} {goods}[ per day|].|the daily number [of {goods} |]is {e}.",
    )
    if s.rng.random() < 0.5:
        eaten = s.between(2, min(20, daily - 4))
        s.tell(
            "{their} [family|children|neighbors] [eat|eats|take] {eaten} of them [every day|each day|a day].",
            eaten=eaten,
        )
        daily = s.sub(
            daily,
            eaten,
            "[{name}|{they}] [keeps|has] {e} {goods} [a|per|each] day.|[that leaves|there are] {e} {goods}[ a day|].|{e} {goods} [remain|are left] each day.",
        )
    total = s.mul(
        daily,
        days,
        "in {days} days, [that is|there are] {e} {goods}.|[after|in] {days} days, [{name}|{they}] has {e} {goods}.|the total [for|in] {days} days is {e}.",
        days=days,
    )
    sizes = [k for k in range(2, 25) if total % k == 0 and total > k]
    if s.rng.random() < 0.6 and sizes:
        k, price = s.choose(sizes), s.between(3, 15)
        s.tell(
            "[After|At the end of] {days} days, [{name}|{they}] packs [all of them|the {goods}|everything] [in|into] boxes of {k}[ each|] and sells [each|every] box for ${price}.",
            days=days,
            k=k,
            price=price,
        )
        s.tell("How much [money |]does {name} [make|earn|get][ in dollars|]?")
        boxes = s.div(
            total,
            k,
            "[{name}|{they}] [fills|has|packs] {e} boxes.|that [makes|gives|fills] {e} boxes.|the number of boxes is {e}.",
        )
        return s.made(
            "bakery",
            s.mul(
                boxes,
                price,
                "[{name}|{they}] [makes|earns|gets] {e} dollars.|the boxes [sell for|bring in] {e} dollars.|the [money|income] is {e} dollars.",
            ),
            "$",
        )
    s.tell("How many {goods} does {name} have [after|in] {days} days?", days=days)
    return s.made("bakery", total, goods)


def _savings(s: _Story) -> Problem:
    start, weekly, weeks = s.between(5, 90), s.between(4, 35), s.between(3, 15)
    thing = s.choose(("a bike", "a guitar", "a phone", "a camera", "a tent", "a skateboard", "a telescope"))
    s.bind(thing=thing)
    s.tell("{name} [wants to buy|is saving for|dreams of buying] {thing}.")
    s.tell("[{they}|{name}] [already has|has saved|starts with] ${start}[ in {their} bank| so far|].", start=start)
    s.tell(
        "[Every|Each] week [{they}|{name}] [gets|saves|puts aside|earns] ${weekly}[ from {their} [father|mother|aunt]| for chores|].",
        weekly=weekly,
    )
    if s.rng.random() < 0.5:
        spend = s.between(1, weekly - 2)
        s.tell(
            "[But |However, |][{they}|{name}] [spends|uses] ${spend} [of it |][a|per|each|every] week [on|for] [snacks|comics|the bus|games].",
            spend=spend,
        )
        weekly = s.sub(
            weekly,
            spend,
            "[{name}|{they}] [saves|keeps] {e} dollars [a|per|each|every] week.|[that leaves|there are] {e} dollars [a|per] week.|the weekly saving is {e} dollars.",
        )
    if s.rng.random() < 0.5:
        price = start + weekly * weeks
        s.tell("{thing} costs ${price}.", price=price)
        s.tell("[After how many|How many] weeks [can {name} buy {thing}|does {name} need|must {name} save]?")
        need = s.sub(
            price,
            start,
            "[{name}|{they}] [still |]needs {e} dollars[ more|].|the missing [money|amount] is {e} dollars.|[there are|that leaves] {e} dollars to save.",
        )
        return s.made(
            "savings",
            s.div(
                need,
                weekly,
                "[{name}|{they}] needs {e} weeks.|[it|this] [takes|will take] {e} weeks.|the number of weeks is {e}.",
            ),
            "weeks",
        )
    saved = s.mul(
        weekly,
        weeks,
        "in {weeks} weeks, [{name}|{they}] [saves|puts aside|gets] {e} dollars.|the savings [after|of] {weeks} weeks are {e} dollars.|{weeks} weeks [give|bring] {e} dollars.",
        weeks=weeks,
    )
    total = s.add(
        start,
        saved,
        "[with the money from before, |with the start, |][{name}|{they}] has {e} dollars.|[altogether|in total], [that is|{they} has] {e} dollars.|the [sum|total] is {e}[ dollars|].",
    )
    price = total + s.between(5, 180)
    s.tell("{thing} costs ${price}.", price=price)
    s.tell(
        "How much [more |]money [does {name} still need|is {name} short|is missing] after {weeks} weeks[ in dollars|]?",
        weeks=weeks,
    )
    return s.made(
        "savings",
        s.sub(
            price,
            total,
            "[{name}|{they}] [still needs|is short of|lacks] {e} dollars.|{e} dollars [are missing|are needed].|the missing [money|amount] is {e} dollars.",
        ),
        "$",
    )


def _garden(s: _Story) -> Problem:
    plant, plants = s.choose(
        (
            ("tomato", "tomatoes"),
            ("rose", "roses"),
            ("carrot", "carrots"),
            ("bean", "beans"),
            ("pumpkin", "pumpkins"),
            ("tulip", "tulips"),
        )
    )
    s.bind(plant=plant, plants=plants)
    rows, each = s.between(3, 20), s.choose((5, 6, 8, 10, 12, 15, 20, 25, 30))
    s.tell(
        "[{name} plants|In {their} garden, {name} plants|On {their} farm, {name} sets] {rows} rows of {plants}[,| with] {each} [in each row|in every row|per row].",
        rows=rows,
        each=each,
    )
    n = s.mul(
        rows,
        each,
        "[{name}|{they}] plants {e} {plants}.|[there are|that is] {e} {plants}[ in the rows|][ at first|].|the number [planted |]is {e}.",
    )
    if _rates(n) and s.rng.random() < 0.7:
        p = s.choose(_rates(n))
        s.tell("[Only |][{p}%|{p} percent] of [them|the {plants}] [grow|survive|make it].", p=p)
        n = s.percent(
            p,
            n,
            "{e} [of them |][grow|survive].|[{p}%|{p} percent] of {n} is {e}.|the number that [grows|survives] is {e}.",
            p=p,
            n=n,
        )
    elif _parts(n):
        top, bottom, word = s.choose(_parts(n))
        s.tell("[Sadly, |Then |]{word} of [them|the {plants}] are eaten by [rabbits|birds|deer|snails].", word=word)
        gone = s.fraction(
            top,
            bottom,
            n,
            "the animals eat {e}[ {plants}|].|{word} of {n} is {e}.|{e} {plants} are [eaten|lost].",
            word=word,
            n=n,
        )
        n = s.sub(
            n,
            gone,
            "[that leaves|there are] {e} {plants}[ left|].|{e} {plants} [remain|are left].|[{name}|{they}] [still |]has {e} {plants}.",
        )
    if s.rng.random() < 0.5:
        k = s.between(2, 9)
        s.tell(
            "[{name}|{they}] [gives|hands] {k} {plants} to each of {their} {m} [neighbors|friends|cousins].",
            k=k,
            m=(m := s.between(2, 4)),
        ) if n > 40 else s.tell("[||It is a sunny year.|The soil is good.]")
        if n > 40:
            gone = s.mul(
                k,
                m,
                "[{name}|{they}] [gives away|hands out] {e} {plants}.|the [neighbors|gifts] take {e} {plants}.|{e} {plants} are given away.",
            )
            n = s.sub(
                n,
                gone,
                "[that leaves|there are] {e} {plants}[ left|].|{e} {plants} [remain|are left].|[{name}|{they}] [still |]has {e} {plants}.",
            )
    price = s.between(2, 8)
    s.tell(
        "[{name}|{they}] sells [the rest|the remaining {plants}|all that are left] [for|at] ${price} [each|apiece].",
        price=price,
    )
    s.tell("How much [money |]does {name} [make|earn|get][ in dollars|]?")
    return s.made(
        "garden",
        s.mul(
            n,
            price,
            "[{name}|{they}] [makes|earns|gets] {e} dollars.|the {plants} [sell for|bring in] {e} dollars.|the [money|income] is {e} dollars.",
        ),
        "$",
    )


_FAMILIES: tuple[Callable[[_Story], Problem], ...] = (
    _inventory, _inventory, _shopping, _shopping, _earnings, _compare, _compare, _travel, _groups, _bakery, _savings, _garden,
)  # fmt: skip
MIN_STEPS, MAX_STEPS = 2, 6


def _make(rng: Random) -> Problem:
    while True:
        made = _FAMILIES[int(rng.random() * len(_FAMILIES))](_Story(rng))
        if (
            MIN_STEPS <= len(made.steps) <= MAX_STEPS
            and 0 < int(made.answer) <= 9999
            and all(st.value > 0 for st in made.steps)
        ):
            return made


def problem(seed: int) -> Problem:
    """The problem of one seed (a pure function of it). Raises ValueError for a seed outside every split."""
    return replace(draw(seed, "math", _make), seed=seed)
