"""What is said of keys that are none, of flags, and of draws that cannot depend on a key."""

import pytest
import torch

import forall.random as R
from forall import jacfwd, vmap
from golden import refused

KEY = R.key(0)


def noise(x):
    return x + torch.rand(())


def test_a_seed_for_a_key():
    with refused(
        TypeError,
        """
        normal(key, ...): a key is a tensor.
            key   0   int
        Make one of a seed: forall.random.key(0).
        """,
    ):
        R.normal(0)  # pyright: ignore[reportArgumentType]


def test_a_tensor_of_another_dtype_for_a_key():
    with refused(
        TypeError,
        """
        uniform(key, ...): a key is an int64 tensor of shape (2,).
            key   float32[2]
        Make one of a seed: forall.random.key(0).
        """,
    ):
        R.uniform(torch.zeros(2))


def test_many_keys_for_one():
    with refused(
        ValueError,
        """
        split(key, ...): a key is an int64 tensor of shape (2,).
            key   int64[3, 2]
        For many keys map over them: vmap(f)(forall.random.split(key, n)).
        """,
    ):
        R.split(R.split(KEY, 3))


def test_no_seed():
    with refused(
        TypeError,
        """
        key(seed): a seed is an int, or an integer tensor of rank 0.
            seed   int64[3]   Tensor
        For many keys write split(key(0), n), or vmap(key)(seeds).
        """,
    ):
        R.key(torch.arange(3))


def test_no_data():
    with refused(
        TypeError,
        """
        fold_in(key, data): data is an int, or an integer tensor of rank 0.
            data   1.5   float
        Fold in one number after another, or map over them: vmap(fold_in, (None, 0)).
        """,
    ):
        R.fold_in(KEY, 1.5)  # pyright: ignore[reportArgumentType]


def test_bits_of_no_integer():
    with refused(
        TypeError,
        """
        bits(key, shape, dtype): the dtype must be an integer one.
            dtype   torch.float32
        Take torch.uint32, or int32 to compute on; see uniform for numbers from 0 to 1.
        """,
    ):
        R.bits(KEY, (), torch.float32)


def test_a_draw_of_no_floating_point_dtype():
    with refused(
        TypeError,
        """
        gumbel(key, ...): the dtype must be a floating-point one.
            dtype   torch.int64
        Take torch.float32, float64, float16 or bfloat16.
        """,
    ):
        R.gumbel(KEY, (3,), torch.int64)


@pytest.mark.parametrize(
    ("verb", "call", "text"),
    [
        ("normal", lambda: R.normal(KEY, 3), "3 int"),
        ("normal", lambda: R.normal(KEY, 3, 4), "3 int"),
        ("uniform", lambda: R.uniform(KEY, (2.5,)), "(2.5,) tuple"),
        ("randint", lambda: R.randint(KEY, 3, 0, 5), "3 int"),
        ("choice", lambda: R.choice(KEY, 5, 3), "3 int"),
        ("bernoulli", lambda: R.bernoulli(KEY, 0.5, 3), "3 int"),
        ("split", lambda: R.split(KEY, -1), "(-1,) tuple"),
        ("split", lambda: R.split(KEY, 2.0), "2.0 float"),
    ],
)
def test_what_is_no_shape(verb, call, text):
    with refused(
        TypeError,
        f"""
        {verb}(key, ...): a shape is a tuple of ints, none of them negative.
            shape   {text.replace(" ", "   ")}
        For three numbers write (3,), for one number of no dims ().
        """,
    ):
        call()


def test_a_mean_in_the_place_of_the_dtype():
    with refused(
        TypeError,
        """
        forall.random: a dtype is one of torch's.
            dtype   5.0   float
        Take torch.float32, float64, float16 or bfloat16. For a mean and a deviation write mean + std * normal(key, shape).
        """,
    ):
        R.normal(KEY, (3,), 5.0)


def test_parameters_larger_than_the_shape():
    with refused(
        ValueError,
        """
        gamma(key, ...): the parameters do not broadcast to the shape.
            shape        (2,)
            parameters   (3,)
        Give the shape of the whole result, or None for that of the parameters.
        """,
    ):
        R.gamma(KEY, torch.ones(3), (2,))


def test_a_range_without_integers():
    with refused(
        ValueError,
        """
        randint(key, shape, minval, maxval): there must be 1 to 2**63 - 1 integers to draw.
            minval   3
            maxval   3
        maxval itself is not drawn; bits gives whole words.
        """,
    ):
        R.randint(KEY, (2,), 3, 3)


def test_more_choices_than_there_are():
    with refused(
        ValueError,
        """
        choice(key, a, shape): there are fewer entries than are drawn.
            entries   3
            drawn     4
        Draw with replace=True, or draw fewer.
        """,
    ):
        R.choice(KEY, 3, (4,), replace=False)
    with refused(
        ValueError,
        """
        choice(key, a, shape, p=p): p has one number for each entry.
            entries   3
            p         float32[2]
        Give a tensor of rank 1.
        """,
    ):
        R.choice(KEY, 3, (4,), p=torch.ones(2))


def test_an_order_of_nothing():
    with refused(
        ValueError,
        """
        permutation(key, x): a tensor of rank 0 has no order.
            x   float32[]
        Give an int n for the numbers below n, or a tensor of rank 1 or more.
        """,
    ):
        R.permutation(KEY, torch.tensor(1.0))


def test_probabilities_without_a_dim():
    with refused(
        ValueError,
        """
        dirichlet(key, alpha): alpha has one entry for each probability.
            alpha   ()
        Give a tensor of rank 1 or more.
        """,
    ):
        R.dirichlet(KEY, torch.tensor(1.0))


def test_a_covariance_of_another_size():
    with refused(
        ValueError,
        """
        multivariate_normal(key, mean, cov): the shapes must end in n and in n, n.
            mean   (3,)
            cov    (2, 2)
        Give a mean for every row of the covariance.
        """,
    ):
        R.multivariate_normal(KEY, torch.zeros(3), torch.eye(2))


def test_a_flag_that_is_none():
    with refused(
        RuntimeError,
        """
        vmap(randomness='diffrent'): no such flag.
        It is one of 'error' (default), 'different' and 'same', or a key of forall.random.
        """,
    ):
        vmap(noise, randomness="diffrent")
    with refused(
        RuntimeError,
        """
        jacfwd(randomness=int64[2]): no such flag.
        It is one of 'error' (default), 'different' and 'same'.
        """,
    ):
        jacfwd(noise, randomness=KEY)  # pyright: ignore[reportArgumentType]


def test_a_tensor_that_is_no_key_for_a_flag():
    with refused(
        ValueError,
        """
        vmap(randomness=int64[5, 2]): a key is an int64 tensor of shape (2,).
            key   int64[5, 2]
        For many keys map over them: vmap(f)(forall.random.split(key, n)).
        """,
    ):
        vmap(noise, randomness=R.split(KEY, 5))


def test_no_key_for_a_scope():
    with refused(
        TypeError,
        """
        scope(key, example): a key is a tensor.
            key   0   int
        Make one of a seed: forall.random.key(0).
        """,
    ):
        R.scope(0)  # pyright: ignore[reportArgumentType]


def test_the_next_key_of_no_scope():
    with refused(
        RuntimeError,
        """
        next_key(): there is no key to draw from.
            running   no scope
            needed    scope(key), or vmap(f, randomness=key)
        Enter a scope first, or hand a key to the function: split(key, n).
        """,
    ):
        R.next_key()


def test_a_key_where_torchs_own_vmap_must_do_the_work():
    def inner(x):
        with refused(
            NotImplementedError,
            """
            vmap(noise, in_dims=0): torch.compile and the transforms of torch.func cannot draw by a key.
                randomness   int64[2]
            Use forall's transforms around it, or hand each example a key: vmap(f)(x, split(key, n)).
            """,
        ):
            vmap(noise, randomness=KEY)(x)
        return x

    torch.func.vmap(inner)(torch.zeros(2, 3))


def test_a_kernel_that_takes_no_keys():
    q = torch.zeros(1, 2, 4, 8)
    with R.scope(KEY), refused(
        NotImplementedError,
        """
        _scaled_dot_product_flash_attention_for_cpu draws inside a kernel that takes no keys.
            operator    aten._scaled_dot_product_flash_attention_for_cpu.default
            asked for   draws that depend on a key
        For attention use torch.nn.attention.sdpa_kernel(SDPBackend.MATH); else turn off its dropout, or draw with torch.rand.
        """,
    ):  # fmt: skip
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.5)


def test_a_message_of_torchs_own_operator():
    with R.scope(KEY), pytest.raises(RuntimeError, match=r"std >= 0\.0, but found std -1"):
        torch.empty(3).normal_(0, -1)
