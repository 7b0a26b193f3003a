"""The rules, a file per family of operators; importing this package enters them all."""

from forall._batching.rules import arrange, calls, factory, batch_norm, norm, scan, softmax, sort, indexing, scatter, linalg, reseat, special, reduce, views, attention, conv, embedding, fft, loss, matmul, pool, shape, write, random  # noqa: F401
