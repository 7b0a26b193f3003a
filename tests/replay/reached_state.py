"""State that a function reaches, which is changed later; `test_what_guards_see.py` says how.

A block has a name, the source of a module (``f: y`` is a function f of x that returns y), what is
run between two calls (>), and what is run in the end (?). The name begins with "-" where nothing
can be compared, so that each call has to run.
"""

NAMES = """
# slots that are keywords
class Edge: __slots__ = ("from", "to", "None", "class")
e = Edge()
for n in Edge.__slots__: setattr(e, n, 2.)
f: x * getattr(e, "from") + e.to
> setattr(e, "from", 3.)

# slots in other letters
class Edge: __slots__ = ("\N{LATIN SMALL LIGATURE FI}eld", "\N{ANGSTROM SIGN}")
e = Edge()
for n, d in [*vars(Edge).items()]:
 if isinstance(d, types.MemberDescriptorType): d.__set__(e, 2.)
S = [d for d in vars(Edge).values() if isinstance(d, types.MemberDescriptorType)][0]
f: x * S.__get__(e)
> S.__set__(e, 3.)

# attributes that are no identifiers
class Config: pass
cfg = Config()
for n in ["weight-decay", "for", "1", "a b", "", "x\\ny", "a'b"]: setattr(cfg, n, 2.)
def other(): return getattr(cfg, "") * getattr(cfg, "a'b", 1.)
f: x * getattr(cfg, "weight-decay") + other() + getattr(cfg, "a b")
> setattr(cfg, "weight-decay", 3.)

# an attribute that is a keyword
class Config: pass
cfg = Config()
setattr(cfg, "lambda", 2.)
f: x * getattr(cfg, "lambda")
> setattr(cfg, "lambda", 3.)

# an attribute that is no identifier and not there at first
class Config: pass
cfg = Config()
f: x * getattr(cfg, "weight-decay", 2.)
> setattr(cfg, "weight-decay", 3.)

# an attribute that is no identifier and goes
class Config: pass
cfg = Config()
setattr(cfg, "weight-decay", 3.)
f: x * (2. if not hasattr(cfg, "weight-decay") else 3.)
> delattr(cfg, "weight-decay")

# an attribute of a class, that is no identifier
class Config: pass
setattr(Config, "weight-decay", 2.)
f: x * getattr(Config, "weight-decay") + getattr(Config(), "weight-decay")
> setattr(Config, "weight-decay", 3.)

# -a global that is no identifier
globals()["weight-decay"] = 2.
f: x * globals()["weight-decay"]
> globals()["weight-decay"] = 3.

# an attribute of a module of the user's that is no identifier
M = sys.modules[__name__]
setattr(M, "weight-decay", 2.)
f: x * getattr(M, "weight-decay")
> setattr(M, "weight-decay", 3.)

# an attribute of a function, that is no identifier
def g(): pass
setattr(g, "weight-decay", 2.)
f: x * getattr(g, "weight-decay")
> setattr(g, "weight-decay", 3.)

# a name that is code
class Config: pass
cfg, FOUND = Config(), []
N = "a0 or FOUND.append(1) or a0"
setattr(cfg, N, 2.)
f: x * getattr(cfg, N)
> setattr(cfg, N, 3.)
? assert not FOUND

# a name whose text is code to who prints it
builtins.RAN = RAN = []
class Name(str):
 def __repr__(self): return "'weight'] is RAN.append(1) or {'a': 2.}['a'"
class Config: pass
cfg = Config()
vars(cfg)[Name("weight")] = 2.
f: x * cfg.weight
> cfg.weight = 3.
? assert not RAN; del builtins.RAN

# slots and more of an object
class Base: __slots__ = ("from",)
class Edge(Base): pass
e = Edge()
setattr(e, "from", 2.)
e.to = 3.
f: x * getattr(e, "from") + e.to
> setattr(e, "from", 3.)

# keywords of a dict of arguments
KW = {"from": 2., "a-b": 1.}
def g(x, **kw): return x * kw["from"] + kw["a-b"]
f: g(x, **KW)
> KW["from"] = 3.

# names of a class made with type
C = type("no name", (), {"1": 2., "if": 1.})
f: x * getattr(C, "1")
> setattr(C, "1", 3.)
"""
