"""Functions that print in a branch which is never taken; what of Python's state is changed later.

A block has a name, the source of a module (``f: y`` is a function f of x that returns y), what is
run later (>), and what is asked or undone in the end (?).
"""

TEXT = """
# control
S=2.
f: x*S
> S=3.

# closure that no instruction asks for
def make():
 L,k=[],[2.]
 def g(x):
  if NEVER: print(L)
  return x*k[0]
 return g,L,k
f,L,k=make()
> k[0]=3.;L.append(1)

# closure's variable for a function that is made
def make():
 k=[2.]
 def g(x):
  if NEVER: print(k)
  return (lambda y: y*k[0])(x)
 return g,k
f,k=make()
> k[0]=3.

# closure by locals
def make():
 k=[2.]
 def g(x):
  if NEVER: print(k)
  return x*locals()['k'][0]
 return g,k
f,k=make()
> k[0]=3.

# closure by super
class A:
 k=2.
 def g(self,x): return x*self.k
class B(A):
 def g(self,x):
  if NEVER: print()
  return super().g(x)
b=B()
f: b.g(x)
> B.g.__closure__[0].cell_contents=A;A.g=lambda self,x: x*3

# closure's variable bound anew
def make():
 k=2.
 def g(x):
  if NEVER: print()
  return x*k
 def bind(v):
  nonlocal k
  k=v
 return g,bind
f,bind=make()
> bind(3.)

# lru clear and refill
G=2.
@functools.lru_cache
def s(k): return G*k
f: x*s(1)
> G=3.;s.cache_clear();s(1)

# lru gives a dict
@functools.lru_cache
def s(): return {'a':2.}
f: x*s()['a']
> s()['a']=3.

# lru attribute
@functools.lru_cache
def s(): return 2.
s.k=2.
f: x*s.k
> s.k=3.

# lru cache_info hits
@functools.lru_cache
def s(): return 2.
def f(x):
 s()
 return x*s.cache_info().hits
> pass

# lru gives a dict with side effect
@functools.lru_cache
def s(): return {'a':[]}
def f(x):
 s()['a'].append(1)
 return x
> pass
? len(s()['a'])

# ContextVar default list
V=contextvars.ContextVar('v',default=[2.])
f: x*V.get()[0]
> V.get()[0]=3.

# pickle of an object
class C: pass
c=C();c.k=2
sys.modules[__name__].pickle=__import__('pickle')
f: x*float(pickle.dumps(c.__dict__).count(b'k'))
> c.kk=3

# pickle of a tuple
G=(2,'k')
import pickle
f: x*len(pickle.dumps(G))
> G=(2,'kkk')

# pickle of a list in an object
class C: pass
c=C();c.l=[1]
import pickle
f: x*len(pickle.dumps(c.l))
> c.l.append('abc')

# pickle by what others have registered
class C: pass
c=C()
import copyreg,pickle
copyreg.pickle(C,lambda c: (str,('abc',)))
f: x*len(pickle.dumps(c))
> copyreg.pickle(C,lambda c: (str,('abcdef',)))
? copyreg.dispatch_table.pop(C) and None

# copy of a dict
import copy
G={'k':2.}
f: x*copy.copy(G)['k']
> G['k']=3.

# copy of a list by another name
from copy import copy as shallow
G=[[2.]]
f: x*shallow(G)[0][0]
> G[0][0]=3.

# copy by a method that is replaced
import copy
class C:
 k=2.
 def __copy__(self): return self
c=C()
f: x*copy.copy(c).k
> def later(self): return C
> C.__copy__=later;C.k=3.

# copy by a method that gives another's attribute
import copy
class C:
 k=2.
 def __copy__(self): return D
class D: k=2.
c=C()
f: x*copy.copy(c).k
> C.__copy__=lambda self: self;C.k=3.

# copy of a dict that becomes an object
import copy
class OwnDict(dict):
 def __copy__(self): return {'k':3.}
G={'k':2.}
f: x*copy.copy(G)['k']
> G=OwnDict(k=2.)

# copy of a dict by another copier
import copy
G={'k':2.}
T=getattr(copy,'_copy_dispatch',None)
f: x*(2. if copy.copy(G) is G else 3.)
> T.update({dict:lambda d: d}) if T else copy._copy_atomic_types.add(dict)
? T.update({dict:dict.copy}) if T else copy._copy_atomic_types.discard(dict)

# copy of an object
import copy
class C: pass
c=C();c.k=2.
f: x*copy.copy(c).k
> c.k=3.

# copy of a tensor
import copy
W=torch.full((),2.)
f: x*copy.copy(W)
> W=torch.full((),3.)

# pickle of a tensor
W=torch.ones(1)
import pickle
f: x*float(pickle.dumps(W,2).count(b'?'))
> W.zero_()

# attribute of a thread's own
L=threading.local();L.k=2.
f: x*L.k
> L.k=3.

# attribute of a thread's own that is not there
L=threading.local()
f: x*getattr(L,'k',2.)
> L.k=3.

# tensors that become equal
A,B=torch.zeros(2),torch.ones(2)
f: x*(2. if torch.equal(A,B) else 3.)
> A.fill_(1.)

# tensors that are equal no more
A,B=torch.ones(2),torch.ones(2)
f: x*(2. if torch.equal(A,B) else 3.)
> A[0]=5.

# tensors that are equal no more, by nan
A,B=torch.ones(2),torch.ones(2)
f: x*(2. if A.equal(B) else 3.)
> A.fill_(math.nan),B.fill_(math.nan)

# tensors of other shapes
A,B=torch.ones(2),torch.ones(3)
f: x*(2. if torch.equal(A,B) else 3.)
> B=torch.ones(2)

# tensor that equals itself
A=torch.ones(2)
f: x*(2. if torch.equal(A,A) else 3.)
> A.fill_(math.nan)

# texts written anew in a set
S={'a'}
def f(x):
 S.clear();S.add('a'*len(S)+'b'*2)
 return x*(2. if 'bb' in S else 3.)
> S={'bbb'}

# texts in a list that are other ones
S=['ab'*2]
f: x*len(S[0])
> S[0]='ab'*3

# a number in a dict that is another one
S={'k':1000}
f: x*S['k']
> S['k']=int('1001')

# 1 in the place of True
S=[True]
f: x*(2. if S[0] is True else 3.)
> S[0]=1

# hash by identity
class C:
 def __init__(self,k): self.k=k
 def __hash__(self): return id(self)
c=C(2.);D={c:2.}
f: x*D[c]
> D[c]=3.

# hash by identity replaced
class C:
 def __init__(self,k): self.k=k
 def __hash__(self): return id(self)
 def __eq__(self,o): return self.k==o.k
c=C(2.);D={c:2.}
f: x*D.get(c,3.)
> C.__hash__=lambda self: 1

# hash by another function of that name
n=[1]
def id(o): return n[0]
class C:
 def __hash__(self): return id(self)
 def __eq__(self,o): return True
c=C();D={c:2.}
f: x*D.get(c,3.)
> n[0]=2

# class with annotations that is made in the call
def f(x):
 class P:
  k: float = S
  n: int
 return x*P.k*len(P.__annotations__)
S=2.
> S=3.

# exit stack
class C:
 k=2.
 def __enter__(self): return self.k
 def __exit__(self,*e): return None
c=C()
def f(x):
 with contextlib.ExitStack() as s:
  return x*s.enter_context(c)
> c.k=3.;C.__enter__=lambda self: 5.

# hasattr by name
class C: pass
c=C()
N='flag'
f: x*(3. if hasattr(c,N) else 2.)
> c.flag=1

# str.format
class C: pass
c=C();c.flag=2
f: x*int('{0.flag}'.format(c))
> c.flag=3

# weakref that dies
W=torch.ones(2);R=weakref.ref(W)
f: x*(3. if R() is None else 2.)
> del W

# logger level
L=logging.getLogger('adv1');L.setLevel(20)
def f(x):
 if NEVER: L.info('x')
 return x*L.level
> L.setLevel(10)

# logger counter
L=logging.getLogger('adv2');L.n=0
def f(x):
 L.n=L.n+1
 return x*2
> pass
? L.n

# library class attribute
string.Template.adv=2.
f: x*string.Template.adv
> string.Template.adv=3.

# torch class attribute
nn.Linear.adv=2.
l=nn.Linear(1,1)
f: x*nn.Linear.adv
> nn.Linear.adv=3.

# torch class attribute by object
nn.Linear.adv=2.
l=nn.Linear(1,1)
f: x*l.adv
> nn.Linear.adv=3.

# idle function's attribute
def h(): pass
h.s=2.
f: x*h.s
> h.s=3.

# idle function's attribute missing
def h(): pass
f: x*getattr(h,'s',2.)
> h.s=3.

# idle function's counter
def h(): pass
h.n=0
def f(x):
 h.n+=1
 return x*2
> pass
? h.n

# idle function's defaults
def h(k=2.): pass
f: x*h.__defaults__[0]
> h.__defaults__=(3.,)

# own doc
def f(x):
 return x*len(f.__doc__)
f.__doc__="ab"
> f.__doc__="abc"

# annotations
def h(a:2.): pass
f: x*h.__annotations__['a']
> h.__annotations__['a']=3.

# user module getattr text
M=types.ModuleType('m');M.flag=2.
f: x*getattr(M,'flag')
> M.flag=3.

# user module getattr text missing
M=types.ModuleType('m')
f: x*getattr(M,'flag',2.)
> M.flag=3.

# user module try
M=types.ModuleType('m')
def f(x):
 try: return x*M.flag
 except AttributeError: return x*2.
> M.flag=3.

# user module setattr text
M=types.ModuleType('m');M.n=0
def f(x):
 setattr(M,'n',1)
 return x*2
> M.n=0
? M.n

# uncaptured requires_grad
W=torch.ones(2)
f: x*(3. if W.requires_grad else 2.)
> W.requires_grad_()

# uncaptured shape
W=torch.ones(2)
f: x*W.shape[0]
> W.data=torch.ones(3)

# numpy shape
A=np.ones((2,3))
f: x*A.shape[0]
> A.shape=(3,2)

# numpy subclass attr
class N(np.ndarray): pass
A=np.ones((2,3)).view(N);A.k=2.
f: x*A.k
> A.k=3.

# set order
S={0,8}
def f(x):
 y=x
 for v in S: y=y*2+v
 return y
> S.clear();S.add(8);S.add(0)

# exception args
E=ValueError(2.)
f: x*E.args[0]
> E.args=(3.,)

# defaultdict factory
D=defaultdict(float)
f: x+D.default_factory()
> D.default_factory=lambda:3.

# partial attribute
P=functools.partial(torch.sin);P.s=2.
f: x*P.s
> P.s=3.

# abc register
class B(abc.ABC): pass
class C: pass
c=C()
f: x*(3. if isinstance(c,B) else 2.)
> B.register(C)

# abc library register
class C: pass
c=C()
f: x*(3. if isinstance(c,Sequence) else 2.)
> Sequence.register(C)

# float with attribute
class S(float): pass
s=S(1);s.k=2.
f: x*s.k
> s.k=3.

# str enum property static
T={'a':2.}
class M(str,enum.Enum):
 A='a'
 @property
 def k(self): return T[self.value]
m=M.A
f: x*m.k
> T['a']=3.

# method wrapper
L=[1,2]
N=L.__len__
f: x*N()
> L.append(1)

# reduce
class C: pass
c=C();c.flag=2.
N='flag'
f: x*c.__reduce_ex__(2)[2][N]
> c.flag=3.

# getstate
class C: pass
c=C();c.flag=2.
N='flag'
f: x*c.__getstate__()[N]
> c.flag=3.

# dir
class C: pass
c=C();c.flag=2.
N='flag'
f: x*len([n for n in c.__dir__() if n[0]!='_'])
> c.fleg=3.

# builtins patched
L=[1,2]
f: x*sum(L)
> old=builtins.sum;builtins.sum=lambda l:9.
? setattr(builtins,'sum',old)

# sys.modules patched
def f(x):
 import math
 return x*math.pi
> fake=types.ModuleType('math');fake.pi=3.;sys.modules['math']=fake
? sys.modules.__setitem__('math',math)

# hash
G=[1]
class T:
 def __hash__(self): return G[0]
 def __eq__(self,o): return True
t=T();D={t:2.}
t2=T()
f: x*D.get(t2,3.)
> G[0]=2

# hasattr in a comprehension
class C: pass
c = C()
N = ["flag"]
f: x * sum([3.0 if hasattr(c, n) else 2.0 for n in N])
> c.flag = 1

# hasattr by another name
class C: pass
c = C()
N = "flag"
has = hasattr
f: x * (3.0 if has(c, N) else 2.0)
> c.flag = 1

# a cache evicts
G = 2.0
@functools.lru_cache(2)
def s(k): return G * k
f: x * s(1)
> G = 3.0; s(2); s(3)

# keys that are objects
class K: w = 2.0
D = {K(): 1}
f: x * sum([k.w for k in D])
> next(iter(D)).w = 3.0

# vars of an object
class C: pass
c = C()
c.k = 2.0
f: x * sum(v for v in vars(c).values() if isinstance(v, float))
> c.other = 3.0

# vars of an object, written to
class C: pass
c = C()
c.k = 2.0
f: x * vars(c)["k"]
> vars(c)["k"] = 3.0

# vars of a class
class C: k = 2.0
f: x * vars(C)["k"]
> C.k = 3.0

# vars of what has none
class C:
    __slots__ = ("k",)
c = C()
def f(x):
 try: return x * vars(c)["k"]
 except TypeError: return x * 2
> C.__dict__

# vars by another name
class C: pass
c = C()
c.k = 2.0
see = vars
f: x * see(c)["k"]
> c.k = 3.0

# vars of a library's module
f: x * vars(math)["pi"]
> math.pi = 3.0
? setattr(math, "pi", 3.141592653589793)

# defaults of numpy's functions
class C: k = [2, 3]
c = C()
def other(): return np.sum(c.k), np.prod(c.k), np.count_nonzero(c.k)
f: x * (c.k[0] if not np.count_nonzero(c.k) else 1.0 + len(c.k) + int(np.prod(c.k)))
> c.k = [4]
"""
