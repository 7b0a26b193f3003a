"""State that a function reaches, which is changed later; `test_guards_notice_changes.py` says how.

A block has a name, the source of a module (``f: y`` is a function f of x that returns y), what is
run between two calls (>), and what is run in the end (?). The name begins with "-" where nothing
can be compared, so that each call has to run, and with "~" where `jit` is told besides that the
function has nothing of the kind.
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

MOVED_ON = """
# -iterator of a deque
it = iter(deque(float(i) for i in range(100)))
f: x * next(it)
> pass

# -reversed deque
it = reversed(deque(float(i) for i in range(100)))
f: x * next(it)
> pass

# -iterator of an array
it = iter(array.array("d", range(100)))
f: x * next(it)
> pass

# -iterator of a list
it = iter([float(i) for i in range(100)])
f: x * next(it)
> pass

# -iterator of a dict
it = iter({float(i): i for i in range(100)})
f: x * next(it)
> pass

# -iterator of an ordered dict
it = iter(OrderedDict((float(i), i) for i in range(100)))
f: x * next(it)
> pass

# -iterator of an array of numpy's
it = np.arange(100.).flat
f: x * float(next(it))
> pass

# -zip map enumerate
it = zip(range(100), map(float, range(100)))
f: x * next(it)[1]
> pass

# -counter of itertools
it = itertools.count(1.)
f: x * next(it)
> pass

# -cycle of itertools within a list
it = [itertools.cycle([1., 2., 3.])]
f: x * next(it[0])
> pass

# -class derived from an iterator
class It(zip): pass
it = It(range(100))
f: x * next(it)[0]
> pass

# -class derived from an iterator of itertools
class It(itertools.chain): pass
it = It(range(100))
f: x * next(it)
> pass

# -generator
def gen():
 i = 0.
 while True:
  i += 1
  yield i
it = gen()
f: x * next(it)
> pass

# -sent to a generator
def gen():
 i = 0.
 while True: i += (yield i)
it = gen(); next(it)
f: x * it.send(1.)
> pass

# -bound method of an iterator
step = iter(deque(range(1, 100))).__next__
f: x * step()
> pass

# -partial of next
step = functools.partial(next, iter(deque(range(1, 100))))
f: x * step()
> pass

# -iterator of matches
it = re.finditer("[0-9]", "1234567890123456789012345")
f: x * int(next(it).group())
> pass

# -lines of a file
it = io.StringIO("\\n".join(map(str, range(100))))
f: x * float(next(it))
> pass

# -iterator in a slice
s = slice(iter(deque(range(1, 100))), None)
f: x * next(s.start)
> pass

# -iterator of bytes that were packed
it = struct.iter_unpack("<b", bytes(range(100)))
f: x * next(it)[0]
> pass

# an iterator that counts in Python
class It:
 def __init__(self): self.i = 2.
 def __iter__(self): return self
 def __next__(self): return self.i
it = It()
f: x * next(it)
> it.i = 3.
"""

HELD = """
# list in a slice
box = [2.]
S = slice(box, None)
f: x * S.start[0]
> box[0] = 3.

# object in a slice
class C: k = 2.
S = slice(None, C(), None)
f: x * S.stop.k
> S.stop.k = 3.

# tensor in a slice
S = slice(None, None, torch.tensor([1., 2., 3.]))
f: x * S.step * len(S.step.stride()) * S.step.stride()[0]
> S.step.data = torch.zeros(6)[::2]

# slice in a tuple in a dict
D = {"a": (slice([2.], 1),)}
f: x * D["a"][0].start[0]
> D["a"][0].start[0] = 3.

# slice of numbers
S = slice(0, 2)
f: torch.cat([x.repeat(3)[S], x.repeat(3)])[:3]
> S = slice(1, 3)

# metadata of a hint
A = typing.Annotated[float, [2.]]
f: x * A.__metadata__[0][0]
> A.__metadata__[0][0] = 3.

# arguments of a hint
A = typing.Annotated[float, [2.]]
f: x * typing.get_args(A)[1][0]
> A.__metadata__[0][0] = 3.

# arguments of a generic alias
class B:
 k = 2.
A = list[B]
f: x * A.__args__[0].k
> B.k = 3.

# class of the user's in a generic alias
T = typing.TypeVar("T")
class B(typing.Generic[T]):
 k = 2.
 def __init__(self, x): self.x = x * B.k
A = B[int]
f: A(x).x
> B.k = 3.

# method object
class C:
 k = 2.
 def m(self, x): return x * self.k
c = C()
m = c.m
f: m(x)
> c.k = 3.

# method of a list
box = [2.]
g = box.__getitem__
f: x * g(0)
> box[0] = 3.

# partial of a partial
box = [2.]
def g(x, y=None): return x * y[0]
h = functools.partial(functools.partial(g, y=box))
f: h(x)
> box[0] = 3.

# property object
box = [2.]
P = property(lambda self: box[0])
f: x * P.fget(None)
> box[0] = 3.

# -memoryview
b = bytearray(b"ab")
M = memoryview(b)
f: x * M[0]
> b[0] = 3

# -memoryview of an array
b = array.array("d", [2.])
M = memoryview(b)
f: x * M[0]
> b[0] = 3.

# view of a dict
d = {"a": 2.}
V = d.values()
f: x * sum(V)
> d["a"] = 3.

# mapping proxy
d = {"a": 2.}
V = types.MappingProxyType(d)
f: x * V["a"]
> d["a"] = 3.

# namespace
N = types.SimpleNamespace(a=[2.])
f: x * N.a[0]
> N.a[0] = 3.

# member of an enumeration
class E(enum.Enum): A = [2.]
f: x * E.A.value[0]
> E.A.value[0] = 3.

# property of an enumeration
S = 2.
class E(enum.Enum):
 A = 1
 @enum.property
 def k(self): return S
f: x * E.A.k
> S = 3.

# field of a dataclass
@dataclasses.dataclass
class C:
 k: list = dataclasses.field(default_factory=list, metadata={"a": [2.]})
f: x * C.__dataclass_fields__["k"].metadata["a"][0]
> C.__dataclass_fields__["k"].metadata["a"][0] = 3.

# default of a ContextVar
V = contextvars.ContextVar("v", default=[2.])
f: x * V.get()[0]
> V.get()[0] = 3.

# cell
C = types.CellType(2.)
f: x * C.cell_contents
> C.cell_contents = 3.

# -item getter with an object
class K:
 k = 2.
 def __index__(self): return int(self.k)
i = K()
G = operator.itemgetter(i)
f: x * G([1., 2., 3., 4.])
> i.k = 3.

# ~random numbers of an object
R = random.Random(0)
f: x * R.random()
> pass

# ~random numbers
random.seed(0)
f: x * random.random()
> pass

# ~random numbers of numpy's
R = np.random.RandomState(0)
f: x * float(R.rand())
> pass

# ~generator of numpy's
R = np.random.default_rng(0)
f: x * R.random()
> pass

# ~random numbers of a class derived from random's
class R(random.Random): pass
r = R(0)
f: x * r.random()
> pass

# ~number of ctypes
N = ctypes.c_double(2.)
f: x * N.value
> N.value = 3.

# ~file in memory
N = io.StringIO("2")
f: x * float(N.getvalue())
> N.write("3")

# ~weak proxy
class C: k = 2.
c = C()
P = weakref.proxy(c)
f: x * P.k
> c.k = 3.

# weak reference
class C: k = 2.
c = C()
P = weakref.ref(c)
f: x * P().k
> c.k = 3.

# method of a weak reference's object
class C:
 def __init__(self): self.k = [2.]
 def twice(self): return 2 * self.k[0]
c = C()
P = weakref.ref(c)
f: x * P().twice()
> c.k[0] = 3.

# function that a weak reference's object names
class C: pass
def two(): return G[0]
G, c = [2.], C()
c.of = two
P = weakref.ref(c)
f: x * P().of()
> G[0] = 3.

# -clock that a weak reference's object reads
import time
class C:
 def now(self): return time.time()
c = C()
P = weakref.ref(c)
f: x * (2. + (P().now() < 0))
> pass

# object of a weak reference that is gone
class C: k = 2.
c = C()
P = weakref.ref(c)
f: x * (1. if P() is None else P().k)
> del c

# position in a list
I = iter([1., 2., 3.])
f: x * operator.length_hint(I)
> next(I)

# list that an iterator reads
L = [1., 2., 3.]
I = iter(L)
f: x * operator.length_hint(I) * L[0]
> L[0] = 5.

# position in a tuple
I = iter((1., 2., 3.))
f: x * operator.length_hint(I)
> next(I)

# position in a range
I = iter(range(3))
f: x * operator.length_hint(I)
> next(I)

# position in a range that runs down
I = iter(range(9, 0, -4))
f: x * operator.length_hint(I)
> next(I)

# position in a reversed range
I = reversed(range(3))
f: x * operator.length_hint(I)
> next(I)

# position in a reversed list
I = reversed([1., 2., 3.])
f: x * operator.length_hint(I)
> next(I)

# end of a list
I = iter([1.])
f: x * (2. + operator.length_hint(I))
> next(I)

# end of a reversed list
I = reversed([1.])
f: x * (2. + operator.length_hint(I))
> next(I)

# list that grows after an iterator's end
L = [1.]
I = iter(L)
next(I)
f: x * (2. + operator.length_hint(I))
> L.append(5.)

# list that has grown under an iterator in the middle
L = [1., 2., 3.]
I = iter(L)
f: x * (2. + operator.length_hint(I))
> next(I); L.insert(0, 5.)

# list that grows after an iterator has found its end
L = [1.]
I = iter(L)
f: x * (2. + operator.length_hint(I) * L[0])
> [*I]; L.append(5.)

# annotations
def h(a: 2.): pass
f: x * h.__annotations__["a"]
> h.__annotations__["a"] = 3.

# annotations replaced
def h(a: 2.): pass
f: x * h.__annotations__["a"]
> h.__annotations__ = {"a": 3.}

# annotations of a class
class C: a: 2.
f: x * C.__annotations__["a"]
> C.__annotations__["a"] = 3.

# annotations of a class replaced
class C: a: 2.
f: x * C.__annotations__["a"]
> C.__annotations__ = {"a": 3.}

# annotation of a global
K = 2.
def h(a: K): pass
f: x * h.__annotations__["a"]
> K = 3.

# annotations by the code that makes them
if sys.version_info < (3, 14):
 def h(a: 2.): pass
 h.__annotate__ = lambda how: h.__annotations__
else:
 def h(a: 2.): pass
f: x * h.__annotate__(1)["a"]
> h.__annotate__ = lambda how: {"a": 3.}

# -iterator that a call moves
I = iter([1.] * 99)
f: x * next(I)
> next(I)

# -position in a zip
I = zip([1., 2.], [3., 4.])
f: x * len(type(I).__name__)
> next(I)

# ~exception
E = ValueError([2.])
f: x * E.args[0][0]
> E.args[0][0] = 3.

# ~super object
class A: k = 2.
class B(A): k = 1.
S = super(B, B())
f: x * S.k
> A.k = 3.

# -user's dict
D = collections.UserDict(a=2.)
f: x * D["a"]
> D["a"] = 3.

# -chain of maps
D = collections.ChainMap({}, {"a": 2.})
f: x * D["a"]
> D.maps[1]["a"] = 3.

# counter
D = collections.Counter("ab")
f: x * D["a"]
> D["a"] = 3

# default of a dict
S = [2.]
D = defaultdict(lambda: S[0])
f: x * D.default_factory()
> S[0] = 3.
"""

TENSORS = """
# memory elsewhere
big = torch.arange(12.)
W = big[0:3]
f: x * W.storage_offset() + W
> W.data = big[3:6]

# neg bit
V = torch.arange(3.).to(torch.complex64).real
f: x * (2. if V.is_neg() else 3.)
> V.data = torch.ones(3, dtype=torch.complex64).conj().imag

# conj bit
C = torch.ones(3, dtype=torch.complex64)
f: (x * C).real * (2. if C.is_conj() else 3.)
> C.data = C.data.conj()

# -entries of a sparse tensor
C = torch.eye(3).to_sparse()
f: x * C._nnz()
> C.data = torch.ones(3, 3).to_sparse()

# strides
W = torch.ones(3, 3)
f: x * W.stride()[0]
> W.data = torch.ones(3, 6)[:, ::2].t()

# set_ elsewhere
big = torch.arange(12.)
W = torch.zeros(3)
f: x * (W.storage_offset() + 1) + W
> W.set_(big.untyped_storage(), 3, (3,))

# resized
W = torch.ones(3)
f: x * W.numel()
> W.resize_(6)

# requires grad
W = torch.ones(3)
f: x * (2. if W.requires_grad else 3.)
> W.requires_grad_()

# dtype
W = torch.ones(3)
f: x * W.dtype.itemsize
> W.data = torch.ones(3, dtype=torch.float64)

# -gradient replaced
W = torch.ones(3, requires_grad=True)
W.grad = torch.ones(3)
f: x * W.grad
> W.grad = torch.full((3,), 2.)

# attribute of a tensor
W = torch.ones(3); W.k = 2.
f: x * W.k
> W.k = 3.

# parameter replaced
m = nn.Linear(3, 3)
f: m(x)
> m.weight = nn.Parameter(torch.ones(3, 3))

# parameter that is set elsewhere
m = nn.Linear(3, 3)
f: m(x)
> m.weight.data = torch.ones(6, 6)[1:4, 1:4]

# parameter that is asked where it lies
m = nn.Linear(3, 3)
f: m(x) * (m.weight.storage_offset() + 1)
> m.weight.data = torch.ones(18).view(6, 3)[3:]

# buffer replaced
m = nn.BatchNorm1d(3).eval()
f: m(x.repeat(2, 1))[0]
> m.running_mean = torch.ones(3)

# buffer added
m = nn.Linear(3, 3)
f: x * (2. if hasattr(m, "extra") else 3.)
> m.register_buffer("extra", torch.ones(3))

# train and eval
m = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
f: x * (2. if m[1].training else 3.)
> m.train()

# eval of what drops out
m = nn.Dropout(1.).train()
f: m(x)
> m.eval()

# forward hook added
m = nn.Linear(3, 3)
f: m(x)
> m.register_forward_hook(lambda m, a, y: y * 2)

# hook before forward added
m = nn.Linear(3, 3)
f: m(x)
> m.register_forward_pre_hook(lambda m, a: (a[0] * 2,))

# parametrization registered
m = nn.Linear(3, 3)
class P(nn.Module):
 def forward(self, w): return w * 2
f: m(x)
> parametrize.register_parametrization(m, "weight", P())

# parametrization taken away
m = nn.Linear(3, 3)
class P(nn.Module):
 def forward(self, w): return w * 2
parametrize.register_parametrization(m, "weight", P())
f: m(x)
> parametrize.remove_parametrizations(m, "weight", leave_parametrized=False)

# weight norm
m = nn.Linear(3, 3)
f: m(x)
> parametrizations.weight_norm(m); m.parametrizations.weight.original0.data.fill_(2.)

# forward of an object replaced
m = nn.Linear(3, 3)
f: m(x)
> m.forward = lambda x: x * 7

# forward of a class of torch's replaced
m = nn.Linear(3, 3)
old = nn.Linear.forward
f: m(x)
> nn.Linear.forward = lambda self, x: x * 7
? nn.Linear.forward = old

# call of all modules replaced
m = nn.Linear(3, 3)
old = nn.Module.__call__
f: m(x)
> nn.Module.__call__ = lambda self, x: x * 7
? nn.Module.__call__ = old

# submodule replaced
m = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
f: m(x)
> m[1] = nn.Tanh()

# module in a list
m = nn.ModuleList([nn.Linear(3, 3)])
f: m[0](x)
> m[0] = nn.Tanh()

# dtype of a module
m = nn.Linear(3, 3)
f: m(x.to(m.weight.dtype))
> m.double()

# class of a module
m = nn.ReLU()
f: m(x)
> m.__class__ = nn.Sigmoid
"""

LIBRARIES = r"""
# global forward hook added
m = nn.Linear(3, 3)
f: m(x)
> H = nn.modules.module.register_module_forward_hook(lambda m, a, y: y * 2)
? H.remove()

# global hook before forward added
m = nn.Linear(3, 3)
f: m(x)
> H = nn.modules.module.register_module_forward_pre_hook(lambda m, a: (a[0] * 2,))
? H.remove()

# function that a module of torch's calls
l = nn.Linear(3, 3)
P = mock.patch("torch.nn.functional.linear", lambda x, w, b=None: x * 7)
f: l(x)
> P.start()
? P.stop()

# function of torch's that a function of torch's calls
l = nn.ReLU()
P = mock.patch("torch.relu", lambda x: x * 7)
f: l(x) + F.relu(x)
> P.start()
? P.stop()

# function of a module in a sequence
l = nn.Sequential(nn.Linear(3, 3), nn.GELU())
P = mock.patch("torch.nn.functional.gelu", lambda x, approximate=None: x * 7)
f: l(x)
> P.start()
? P.stop()

# function that the user's function names
P = mock.patch("torch.sin", lambda x: x * 7)
f: torch.sin(x)
> P.start()
? P.stop()

# function that is named by a chain of modules
P = mock.patch("torch.nn.functional.softplus", lambda x: x * 7)
f: torch.nn.functional.softplus(x)
> P.start()
? P.stop()

# function of math
P = mock.patch("math.sqrt", lambda x: 7.)
f: x * math.sqrt(4.)
> P.start()
? P.stop()

# constant of math
P = mock.patch("math.pi", 7.)
f: x * math.pi
> P.start()
? P.stop()

# constant of a library's module that its function reads
P = mock.patch("torch.nn.functional._sym_int", lambda x: 7)
f: F.interpolate(x.reshape(1, 1, 3), scale_factor=2.)[0, 0, :3]
> P.start()
? P.stop()

# method of a class of torch's
l = nn.Linear(3, 3)
P = mock.patch.object(nn.Linear, "forward", lambda self, x: x * 7)
f: l(x)
> P.start()
? P.stop()

# method of tensors
P = mock.patch.object(torch.Tensor, "sin", lambda x: x * 7)
f: x.sin()
> P.start()
? P.stop()

# module that a library's module names
l = nn.Linear(3, 3)
other = types.SimpleNamespace(linear=lambda x, w, b=None: x * 7)
P = mock.patch("torch.nn.modules.linear.F", other)
f: l(x)
> P.start()
? P.stop()

# constant that distributions read
P = mock.patch("torch.distributions.normal.math.pi", 7.)
f: x * dist.Normal(torch.zeros(3), torch.ones(3)).log_prob(torch.ones(3))
> P.start()
? P.stop()

# global that a registered kl reads
S = 2.
class Mine(dist.Normal): pass
@dist.register_kl(Mine, Mine)
def kl(p, q): return S * (p.loc - q.loc) ** 2
def mine(x): return Mine(x, torch.ones(3), validate_args=False)
f: dist.kl_divergence(mine(x), mine(torch.zeros(3)))
> S = 3.
? [dist.kl._KL_REGISTRY.pop(k) for k in [*dist.kl._KL_REGISTRY] if k[0] is Mine]

# kl that is registered later
class Mine(dist.Normal): pass
def mine(x): return Mine(x, torch.ones(3), validate_args=False)
f: dist.kl_divergence(mine(x), mine(torch.zeros(3)))
> dist.register_kl(Mine, Mine)(lambda p, q: p.loc * 7)
? [dist.kl._KL_REGISTRY.pop(k) for k in [*dist.kl._KL_REGISTRY] if k[0] is Mine]
? dist.kl._KL_MEMOIZE.clear()

# function that flattens a class of the user's
S = 2.
class Box:
 def __init__(self, x): self.x = x
pytree.register_pytree_node(Box, lambda b: ([b.x * S], None), lambda c, _: Box(c[0]))
f: pytree.tree_leaves(Box(x))[0]
> S = 3.
? pytree.SUPPORTED_NODES.pop(Box)

# -function of a single dispatch
S = 2.
@functools.singledispatch
def g(x): return x
@g.register(torch.Tensor)
def _(x): return x * S
f: g(x)
> S = 3.

# -function of a single dispatch that is registered later
@functools.singledispatch
def g(x): return x
f: g(x)
> g.register(torch.Tensor)(lambda x: x * 7)

# class that is registered as a subclass
class A(abc.ABC): pass
class C: pass
c = C()
f: x * (2. if isinstance(c, A) else 3.)
> A.register(C)

# -kernel of an operator
S = 2.
L = torch.library.Library("guards_" + __name__, "DEF")
L.define("g(Tensor x) -> Tensor")
L.impl("g", lambda x: x * S, "CompositeImplicitAutograd")
op = getattr(getattr(torch.ops, "guards_" + __name__), "g")
f: op(x)
> S = 3.

# -backward function of an operator
S = 2.
@torch.library.custom_op("guards_of::" + __name__, mutates_args=())
def sc(x: torch.Tensor) -> torch.Tensor: return x * S
def bw(ctx, g): return g * S
sc.register_autograd(bw, setup_context=lambda ctx, inputs, output: None)
sc.register_vmap(lambda info, dims, x: (x * S, dims[0]))
f: getattr(torch.ops.guards_of, __name__)(x)
> S = 3.
"""
