"""Functions that print in a branch which is never taken; what their code leads to is changed later.

A block has a name, the source of a module (``f: y`` is a function f of x that returns y), what is
run later (>), and what is asked or undone in the end (?).
"""

TEXT = """
# tensor method patched
old=torch.Tensor.sin
f: x.sin()
> torch.Tensor.sin=lambda s:s*2
? setattr(torch.Tensor,'sin',old)

# torch module class patched
l=nn.ReLU()
old=nn.ReLU.forward
f: l(x)
> nn.ReLU.forward=lambda s,x:x*7
? setattr(nn.ReLU,'forward',old)

# getattr computed method
class C:
 def a1(self,x): return x*2
 def a2(self,x): return x*3
c=C();n=1
f: getattr(c,f'a{n}')(x)
> n=2

# getattr computed, instance shadows
class C:
 def a1(self,x): return x*2
c=C();n=1
f: getattr(c,f'a{n}')(x)
> c.a1=lambda x:x*3

# descriptor
class D:
 def __init__(s): s.v=2.
 def __get__(s,o,t=None): return s.v
class C: k=D()
c=C()
f: x*c.k
> C.__dict__['k'].v=3.

# __getattr__
class C:
 def __init__(s): s.t={'k':2.}
 def __getattr__(s,n): return s.t[n]
c=C()
f: x*c.k
> c.k=3.

# __class__
class A: k=2.
class B: k=3.
c=A()
f: x*c.k
> c.__class__=B

# slots unset
class A:
 __slots__=('k',)
c=A()
f: x*getattr(c,'k',2.)
> c.k=3.

# decorator run inside and out
def deco(h,k):
 def w(x): return h(x)*k[0]
 return w
K=[2.]
H=deco(torch.neg,K)
T=[H]
f: T[0](x)+deco(torch.sin,[1.])(x)
> K[0]=3.

# mode branch
class C: training=True
c=C()
def f(x):
 if c.training: return x*2
 print('x') if NEVER else None
 return x*3
> c.training=False

# lazy init
class C:
 w=None
c=C()
def f(x):
 if c.w is None:
  print(end='')
  c.w=3.
 return x*c.w
> c.w=None
? c.w

# match class
class P:
 __match_args__=('k',)
 def __init__(s,k): s.k=k
p=P(2)
def f(x):
 match p:
  case P(2): return x*2
  case P(k=3): return x*3
  case _: print()
> p.k=3

# history list
H=[]
def f(x):
 H.append(1)
 return x*2
> pass
? len(H)

# bounded deque history
H=deque([1],maxlen=1)
def f(x):
 H.append(1)
 return x*2
> H.clear()
? len(H)

# ordereddict move
D=OrderedDict(a=1,b=2)
def f(x):
 y=x
 for v in D.values(): y=y*2+v
 return y
> D.move_to_end('a')

# numpy in place
A=np.ones(2)
f: x*float(A[0])
> A[0]=3.

# module hook
n=nn.ReLU()
f: n(x)
> n.register_forward_hook(lambda m,a,o:o*3)

# contextmanager
S=2.
@contextlib.contextmanager
def c():
 global S
 o=S;S=S+1
 try: yield
 finally: S=o
def f(x):
 with c(): return x*S
> S=3.

# local import shadowed package attribute
fake=types.ModuleType('torch.fake');fake.k=3.;real=types.ModuleType('torch.fake');real.k=2.
sys.modules['torch.fake']=real;torch.fake=real
def f(x):
 from torch import fake as q
 return x*q.k
> torch.fake=fake

# way through a module rebound
fake=types.ModuleType('torch.fake2');fake.k=3.;real=types.ModuleType('torch.fake2');real.k=2.
torch.fake2=real
f: x*torch.fake2.k
> torch.fake2=fake

# relative import
import types,importlib.util
__package__=__name__
__path__=[]
ms=types.ModuleType(__name__+".math");ms.SCALE=2.
sys.modules[__name__+".math"]=ms
def f(x):
 from .math import SCALE
 return x*SCALE
> ms.SCALE=3.

# exception caught
E={}
def f(x):
 try: return x*E['k']
 except KeyError: return x*2
> E['k']=3.

# async
S=2.
async def co(x): return x*S
def f(x):
 c=co(x)
 try: c.send(None)
 except StopIteration as e: return e.value
> S=3.

# equal codes, other globals
M=types.ModuleType('m3');Q=types.ModuleType('m4')
src='S=2.\\ndef h(x): return x*S\\n'
exec(src,vars(M));exec(src,vars(Q))
f: M.h(x)+Q.h(x)
> Q.S=3.

# str subclass dict key
class S(str): pass
s=S('a');s.k=2.
D={s:1}
f: x*next(iter(D.keys())).k
> s.k=3.

# property deleter/slots via any
class C:
 def __init__(s): s.cfg={'a':2.}
c=C()
N='cfg'
f: x*getattr(c,N)['a']
> c.cfg['a']=3.

# setattr computed
class C: pass
c=C()
N='cfg'
def f(x):
 setattr(c,N,1)
 return x*2
> c.cfg=0
? c.cfg

# logger isEnabledFor
L=logging.getLogger('advq');L.setLevel(30)
S=[]
class H(logging.Handler):
 def emit(s,r): S.append(1)
L.addHandler(H())
def f(x):
 L.debug('x')
 return x*2
> L.setLevel(10)
? len(S)>0

# warn later
import warnings
class C: n=1
c=C()
def f(x):
 if c.n>1: warnings.warn('x')
 return x*c.n
> c.n=2;import warnings;warnings.simplefilter('error')
? warnings.simplefilter('default')

# classmethod
class V:
 k=2.
 @classmethod
 def m(c,x): return x*c.k
f: V.m(x)
> V.k=3.

# held library by a text
h=types.SimpleNamespace(np=np)
f: x*getattr(h.np,'random').rand()
> np.random.seed(5)

# held library by any name
h=types.SimpleNamespace(np=np,name='random')
f: x*getattr(h.np,h.name).rand()
> np.random.seed(5)

# held library by its dict
h=types.SimpleNamespace(np=np)
f: x*h.np.__dict__['random'].rand()
> np.random.seed(5)

# held library by attributes
h=types.SimpleNamespace(t=torch,name='k',k=2.)
def f(x):
 return h.t.sin(x)*getattr(h,'k',None)*len(inspect.__name__)
import inspect
> h.k=3.

# a kernel of attention
from torch.nn.attention import SDPBackend, sdpa_kernel
K=[2.]
def f(x):
 with sdpa_kernel(SDPBackend.MATH): return F.scaled_dot_product_attention(*[x[None,None]*K[0]]*3)
> K[0]=3.

# tuple that gives nothing
class T(tuple):
 def __len__(s): raise NotImplementedError
 def __iter__(s): raise NotImplementedError
t=T((2.,))
f: x*t[0]
> t=T((3.,))

# list that counts who asks
N=[]
class L(list):
 def __iter__(s): N.append(1); return list.__iter__(s)
 def __len__(s): N.append(1); return list.__len__(s)
l=L([2.])
f: x*l[0]
> l[0]=3.
? len(N)

# dict that counts who asks
N=[]
class D(dict):
 def __iter__(s): N.append(1); return dict.__iter__(s)
 def __len__(s): N.append(1); return dict.__len__(s)
 def values(s): N.append(1); return dict.values(s)
 def get(s,k): N.append(1); return dict.get(s,k)
d=D(a=2.)
f: x*d['a']
> d['a']=3.
? len(N)

# ordered dict of a class, moved
class D(OrderedDict): pass
D=D(a=1,b=2)
def f(x):
 y=x
 for v in D.values(): y=y*2+v
 return y
> D.move_to_end('a')

# object that has no class
class P:
 k=2.
 @property
 def __class__(s): raise RuntimeError('outside')
p=P()
f: x*p.k
> P.k=3.

# metaclass of its own
class M(type):
 k=2.
 def __call__(s,*a):
  r=type.__call__(s,*a)
  r.k=s.k
  return r
class C(metaclass=M):
 def __init__(s,x): s.x=x
f: C(x).x*C(x).k
> M.k=3.

# metaclass with another call
class M(type):
 def __call__(s,*a): return type.__call__(s,*a)
class C(metaclass=M):
 def __init__(s,x): s.x=x
f: C(x).x*2
> M.__call__=lambda s,*a: types.SimpleNamespace(x=3*a[0])

# class of another class
class M(type):
 def k(s): return 2.
class W(type):
 def k(s): return 3.
class C(metaclass=M): pass
f: x*C.k()
> C.__class__=W

# signature
import inspect
S=inspect.signature(lambda a,b=2.: 0)
f: x*len(S.parameters)*S.parameters['b'].default
> S=inspect.signature(lambda b=3.: 0)

# default in a signature
import inspect
S=inspect.signature(lambda b=[2.]: 0)
f: x*S.parameters['b'].default[0]
> S.parameters['b'].default[0]=3.

# typed dict
class D(typing.TypedDict):
 k: float
d=D(k=2.)
f: x*d['k']+len(D(k=1.))
> d['k']=3.

# within a context manager
K=[2.]
@contextlib.contextmanager
def within(k): yield
@within(1)
def s(x): return x*K[0]
f: s(x)
> K[0]=3.

# context manager that counts
N=[]
@contextlib.contextmanager
def within(k):
 N.append(k)
 yield
@within(1)
def s(x): return x*2
f: s(x)
> N.clear()
? len(N)

# partial of its own class
K=[2.]
class P(functools.partial):
 def __call__(s,x): return K[0]*functools.partial.__call__(s,x)
p=P(torch.mul,torch.tensor(2.))
f: p(x)
> K[0]=3.

# graph module
from torch import fx
class M(nn.Module):
 def __init__(s):
  super().__init__()
  s.l=nn.Linear(1,1)
  s.l.weight.data.fill_(2.);s.l.bias.data.fill_(1.)
  s.requires_grad_(False)
 def forward(s,x): return s.l(x.unsqueeze(0)).squeeze().cos()
m=fx.symbolic_trace(M())
f: m(x)
> m.l.bias=nn.Parameter(torch.tensor([2.]),False)

# graph module made anew
from torch import fx
m=fx.symbolic_trace(nn.Tanh())
class Other(nn.Module):
 def forward(s,x): return x.cos()
f: m(x)
> m.graph=fx.symbolic_trace(Other()).graph

# assertion
K=[2.]
def f(x):
 torch._assert(K[0]<4,'too much')
 return x*K[0]
> K[0]=5.

# check
K=[2.]
def f(x):
 torch._check(K[0]<4,lambda: 'too much')
 return x*K[0]
> K[0]=5.

# autocast as a decorator
K=[2.]
@torch.autocast("cpu", enabled=False)
def g(x): return x*K[0]
f: g(x)
> K[0]=5.

# autocast as a decorator, of another dtype
@torch.autocast("cpu", dtype=torch.bfloat16)
def g(x): return torch.stack([x,x])[None]@torch.stack([x,x])[:,None]
def h(x): return torch.stack([x,x])[None]@torch.stack([x,x])[:,None]
f: g(x)
> g=h

# not to be compiled
K=[2.]
@torch.compiler.disable
def s(x): return x*K[0]
f: s(x)
> K[0]=3.

# held library asked whether
h=types.SimpleNamespace(t=torch)
f: x*3 if hasattr(h.t,'forall_never') else x*2
> torch.forall_never=1
? delattr(torch,'forall_never')

# cached property
class C:
 def __init__(s): s.u=2.
 @functools.cached_property
 def k(s): return s.u
c=C()
f: x*c.k
> del c.k;c.u=3.

# cached property of what is made inside
U=[2.]
class C:
 @functools.cached_property
 def k(s): return U[0]
f: x*C().k
> U[0]=3.

# cached property's function
class C:
 @functools.cached_property
 def k(s): return 2.
f: x*C().k
> C.__dict__['k'].func=lambda s:3.

# cached property that is set
class C:
 @functools.cached_property
 def k(s): return 2.
c=C()
f: x*c.k
> c.k=3.

# cached property that counts
class C:
 n=0
 @functools.cached_property
 def k(s):
  C.n+=1
  return 2.
f: x*C().k
> pass
? C.n

# module in an object
h=types.SimpleNamespace(m=types.ModuleType('own'));h.m.k=2.
f: x*h.m.k
> h.m.k=3.

# module in an object by text
h=types.SimpleNamespace(m=types.ModuleType('own'));h.m.k=2.
f: x*getattr(h.m,'k',4.)
> del h.m.k

# module handed on
M=types.ModuleType('own');M.k=2.
def g(m,x): return x*m.k
f: g(M,x)
> M.k=3.

# module imported inside and handed on
M=types.ModuleType('own_seen');M.k=2.;sys.modules['own_seen']=M
def g(m,x): return x*m.k
def f(x):
 import own_seen as o
 return g(o,x)
> M.k=3.

# module imported inside and replaced
M=types.ModuleType('own_seen');M.k=2.;sys.modules['own_seen']=M
def f(x):
 import own_seen
 return x*own_seen.k
> M=types.ModuleType('own_seen');M.k=3.;sys.modules['own_seen']=M

# module taken inside from another
O=types.ModuleType('own_seen');O.m=types.ModuleType('own_seen.m');O.m.k=2.;sys.modules['own_seen']=O
def g(m,x): return x*m.k
def f(x):
 from own_seen import m
 return g(m,x)
> O.m.k=3.

# module that finds names
T={'k':2.}
M=types.ModuleType('own');M.__getattr__=lambda n: T[n]
f: x*M.k
> T['k']=3.

# module that finds names from now on
M=types.ModuleType('own')
f: x*getattr(M,'k',2.)
> M.__getattr__=lambda n: 3.

# module's class
class P(types.ModuleType):
 @property
 def k(s): return 3.
M=types.ModuleType('own');M.k=2.
f: x*M.k
> del M.k;M.__class__=P

# module's function writes
M=types.ModuleType('own');M.n=[0]
def g(m):
 m.n[0]+=1
h=types.SimpleNamespace(m=M)
def f(x):
 g(h.m)
 return x*2
> M.n[0]=0
? M.n[0]

# pattern
P=re.compile('a(.)');T=['a2']
f: x*float(P.match(T[0])[1])
> T[0]='a3'

# pattern replaced
P=re.compile('a(.)')
f: x*float(P.match('a23').group(1))
> P=re.compile('a.(.)')

# pattern found by text
T=['a2'];G=[lambda m: '2']
f: x*float(re.sub('a',G[0],T[0]))
> G[0]=lambda m: '3'

# number of numpy's
class C: pass
c=C();c.k=np.int64(2);c.a=np.arange(3)
f: x*int(c.k)*float(c.a[1])
> c.k=np.int64(3)

# function in TorchScript
@torch.jit.script
def s(x, k: float):
 y = x
 for i in range(2):
  y = y.sin() * k
 return y if x.dim() == 1 else -y
K=[2.]
f: s(x,K[0])
> K[0]=3.

# function in TorchScript replaced
@torch.jit.script
def s(x): return x.sin()
@torch.jit.script
def t(x): return x.cos()
f: s(x)
> s=t

# function in TorchScript that tests
@torch.jit.script
def s(x, k: float):
 if bool((x > k).any()): return x.sin()
 return x.cos()
K=[20.]
f: s(x,K[0])
> K[0]=-3.

# function in TorchScript that prints
@torch.jit.script
def s(x):
 if x.dim() > 2: print("x")
 return x.sin()
f: s(x)
> pass

# held library set anew
h=types.SimpleNamespace(t=torch)
def f(x):
 h.t.forall_set=7
 return x*2
> torch.forall_set=-1
? (torch.forall_set,delattr(torch,'forall_set'))[0]
"""
