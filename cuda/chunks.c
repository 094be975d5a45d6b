/*
 * Chooses the number of messages into which a plan on a device cuts each segment, unless its
 * options say it. The processor's choice suits its caches and the messages that MPI sends eagerly;
 * a device launches kernels over all segments at once, and each launch and each message costs a few
 * microseconds.
 *
 * No bit of a result depends on it: scales are by block, and with one scale by run.
 */
#include "cuda/device.h"

#define MI ((size_t)1 << 20)

/* Elements in a chunk. A further chunk costs a stream about 12 us: the latency of an exchange of
 * NCCL, and gaps between its kernels. Of n elements in c chunks a 1 / c of the shorter of
 * compressing and exchanging overlaps with nothing, and compressing takes n / 354 G/s
 * (docs/cuda.md, H200). The sum of the two is least at c = sqrt(n / (354 G/s * 12 us)). */
#define ELEMENTS_A_CHUNK (4 * MI)

/* From 8 on what a chunk more would still hide is less than an eighth of that. */
#define MAX_STREAMED 8

/* The host launches 3 kernels, 6 copies and as many events a chunk, about 30 us: less than the
 * 84 us that 1 MiB of bits takes at 100 Gbit/s. */
#define ELEMENTS_STAGED (8 * MI)

/* Dense messages have 32 times the bytes: 8 MiB take 18 us at 450 GB/s. */
#define ELEMENTS_DENSE (2 * MI)

/* Also of a window, which has memory for two chunks: three times 4 bytes for each of their
 * elements, so 24 / 16 bytes an element of the plan. */
#define MAX_STAGED 16

static size_t chunks_between(size_t chunks, size_t max) {
  return chunks < 1 ? 1 : chunks < max ? chunks : max;
}

static size_t chunks_on_stream(size_t elements) {
  size_t chunks = 1;
  while (chunks < MAX_STREAMED && (chunks + 1) * (chunks + 1) * ELEMENTS_A_CHUNK <= elements)
    chunks++;
  return chunks;
}

/* With one scale nothing leaves before all is compressed, and what is left to overlap, the
 * reducing of a share, is less than it would cost. */
size_t ob_device_chunks(const struct onebit_plan *plan, size_t elements) {
  const bool in_window =
      plan->schedule->window || plan->choice.schedule == ONEBIT_SCHEDULE_HIERARCHICAL;
  if (plan->comm->size == 1)
    return 1;
  if (in_window)
    return chunks_between(elements / ELEMENTS_DENSE, MAX_STAGED);
  if (!plan->comm->transport->put)
    return chunks_between(elements / ELEMENTS_STAGED, MAX_STAGED);
  return plan->geometry.one_scale ? 1 : chunks_on_stream(elements);
}
