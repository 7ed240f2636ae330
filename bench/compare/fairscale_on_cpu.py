"""Runs FairScale's FullyShardedDataParallel without CUDA, which it requires otherwise."""

import contextlib


def without_streams():
    """FullyShardedDataParallel with one stream that does nothing, in place of CUDA's."""
    import torch
    from fairscale.nn.data_parallel import FullyShardedDataParallel

    class Stream:
        def wait_stream(self, other):
            pass

        def synchronize(self):
            pass

    stream = Stream()
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_stream = lambda *_: stream
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    torch.Tensor.record_stream = lambda self, stream: None
    set_up = FullyShardedDataParallel._setup_streams

    def set_up_streams(self):
        set_up(self)
        self._streams.update(fp32_to_fp16=stream, all_gather=stream, post_backward=stream)  # the children share it

    FullyShardedDataParallel._setup_streams = set_up_streams
    return FullyShardedDataParallel
