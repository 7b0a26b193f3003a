"""Templates of the generated code of each construct, with names in capitals as holes.

`forall._divergence.frame` describes the frame on which this code calls.
"""

from __future__ import annotations

import ast

_YES = """
IF = F.branch(TEST)
if IF.diverged:
    IF.save(F.locals(), KEPT, JOINS)
for TRIP in IF.yes:
    BODY
"""
_NO = """
if IF.diverged:
    FLIP
for TRIP in IF.no:
    ORELSE
"""
_MET = """
if IF.diverged:
    MEET
"""
IF, IF_ELSE = _YES + _MET, _YES + _NO + _MET
WHILE = """
LOOP = F.loop()
while LOOP.test(TEST) or (LOOP.split and LOOP.drop_failed(F.locals())):
    for TRIP in F.once:
        BODY
    AGAIN
FINISH
"""
FOR = """
LOOP = F.loop()
ITEMS = LOOP.iterate_items(IT)
if LOOP.varying:
    LOOP.note(F.locals())
for TARGET in ITEMS:
    for TRIP in F.once:
        BODY
    AGAIN
    if LOOP.varying:
        LOOP.note(F.locals())
FINISH
"""
AT_ONCE = """
DONE = F.run_predicated_if(SITE, TEST, YES, NO, JOINS, F.locals())
if DONE is None:
    APART
else:
    TARGET = DONE
"""
SCALAR = """
DONE = F.scalar(FUNCTION, (NAMES, OPTIONAL), F.locals(), READS, GIVES, CHANGES)
if DONE is None:
    AS_WRITTEN
else:
    TARGET = DONE
    AFTER
"""
SIDE = """
def NAME():
    BODY
    return VALUES
"""
AGAIN = """
if LOOP.exits.waiting:
    REJOIN
if F.dead and not LOOP.has_next_round():
    break
"""
FINISH = """
if LOOP.apart:
    MEET
else:
    LOOP.close_uniform()
"""
FINISH_ELSE = """
if LOOP.apart:
    NORMAL
for TRIP in LOOP.normal:
    ORELSE
if LOOP.apart:
    MEET
else:
    LOOP.close_uniform()
"""
LEAVE = """
VALUE = RESULT
if not F.apart:
    return VALUE
F.leave(VALUE)
break
"""

IN_PLACE = {
    ast.Add: "iadd", ast.Sub: "isub", ast.Mult: "imul", ast.Div: "itruediv",
    ast.FloorDiv: "ifloordiv", ast.Mod: "imod", ast.Pow: "ipow", ast.MatMult: "imatmul",
    ast.LShift: "ilshift", ast.RShift: "irshift", ast.BitAnd: "iand", ast.BitOr: "ior",
    ast.BitXor: "ixor",
}  # fmt: skip
