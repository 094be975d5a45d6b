/*
 * The passes of the optimizers: a loop around each row of compression/pass_element.h.
 *
 * A warp processes a block, and lane l the elements l, l + 32, ... of the block. So a word of signs
 * has one bit for every lane, lane sums are the ones that numerics.h defines, and a tensor may
 * begin anywhere in a buffer. 16, 8 or 4 words of each array are loaded at once, which is 32 to 96
 * bytes in flight per thread, and 24 warps with 32 bytes are what a multiprocessor needs
 * (device.cuh). If all of these words exist, no load has a condition: a GPU has seven predicates,
 * and loads that need more wait for each other. An access of 4 bytes is an instruction for 128
 * bytes, of which an H200 could issue nine times as many as its memory can serve; the arithmetic of
 * the largest pass, about 300 instructions for 3 KiB, overlaps with the accesses.
 *
 * Loading 16-bit gradients one by one would take accesses of 2 bytes, with half as much in flight.
 * So 16 or 8 bytes of gradients are loaded at once, and shared memory passes them to their lanes.
 *
 * Bytes per element, float32: 4 for each array that ob_pass_reads and ob_pass_writes name, 1/8 for
 * a message.
 *
 *   apply (step)            12.13 (8.13)   lamb         28      zero-one         20.13
 *   step (its norms)        8.13 (4.13)    lion         20
 *   adam                    28             lamb move    12      zero-one local   24
 *   frozen                  24             lamb freeze  20      zero-one meet    24
 *   divided                 28             divisors      8      variances         4
 *   freeze, freeze step     16             lamb fresh   16.25   zero-one met     20.13
 *   sgd                     20             lamb frozen  32      zero-one freeze  12
 *   sgd freeze              8                                   squares, power   4
 *
 * In profile deepspeed 0/1 Adam reads and writes OB_MOVED too. If parameters have master values, a
 * pass that writes them writes 2 bytes more. The limit is the card's copy bandwidth.
 */
#include <utility>

#include "compression/pass_element.h"
#include "cuda/location.cuh"

/* Returns the number of words of each array that are loaded at once, as many as registers hold. */
constexpr unsigned choose_group_length(enum ob_pass_kind kind) {
  switch (kind) {
  case OB_PASS_SQUARES: /* one array, and nothing is written */
  case OB_PASS_POWER:
  case OB_PASS_VARIANCES:
    return 16;
  case OB_PASS_ADAM: /* four arrays and more, messages included */
  case OB_PASS_FROZEN:
  case OB_PASS_LAMB:
  case OB_PASS_DIVIDED:
  case OB_PASS_LAMB_FRESH:
  case OB_PASS_LAMB_FROZEN:
  case OB_PASS_ZERO_ONE:
  case OB_PASS_ZERO_ONE_LOCAL:
  case OB_PASS_ZERO_ONE_STORE:
    return 4;
  default:
    return 8;
  }
}

template <enum ob_pass_kind kind> constexpr unsigned words_at_once = choose_group_length(kind);

/* The addresses of a warp's block in the arrays. If OB_MOVED is missing, its elements are read as
 * zeros. */
struct run {
  unsigned count;
  float *arrays[OB_PARAMETER + 1];
  void *copy;
  onebit_dtype_t copy_dtype, gradient_dtype;
  const void *gradient; /* NULL: zeros */
  const uint32_t *message, *last;
  float message_scale, last_scale;
  const float *last_values;
  struct ob_pass_factors factors;
};

static __device__ inline bool has_array(float *const *arrays, int slot) {
  return slot != OB_MOVED || arrays[OB_MOVED];
}

/* --- Addresses, as in apply.c */

template <enum ob_pass_kind kind>
static __device__ inline void point_to_arrays(const struct ob_cuda_pass &pass,
                                              const struct ob_block &block, struct run *run) {
  const unsigned reads = ob_pass_reads(kind), uses = reads | ob_pass_writes(kind);
  const size_t at = (block.word - pass.first_word) * OB_LANES, piece = block.piece;
  OB_UNROLL
  for (int slot = 0; slot < OB_ARRAYS; slot++)
    if (uses & OB_MASK(slot) && has_array(pass.arrays, slot))
      run->arrays[slot] = pass.arrays[slot] + at;
  if (uses & OB_MASK(OB_PARAMETER) && pass.parameters[piece])
    run->arrays[OB_PARAMETER] = pass.parameters[piece] + block.offset;
  run->copy_dtype = pass.copy_dtype;
  if (uses & OB_MASK(OB_PARAMETER) && pass.copies && pass.copies[piece])
    run->copy = (char *)pass.copies[piece] + block.offset * ob_dtype_size(pass.copy_dtype);
  run->gradient_dtype = pass.gradient_dtype;
  if (reads & OB_MASK(OB_GRADIENT) && pass.gradients[piece])
    run->gradient =
        (char *)pass.gradients[piece] + block.offset * ob_dtype_size(pass.gradient_dtype);
  if (reads & OB_MASK(OB_LAST) && pass.last_values)
    run->last_values = pass.last_values + at;
}

static __device__ inline void set_factors(const struct ob_cuda_plan &plan,
                                          const struct ob_cuda_pass &pass, size_t piece,
                                          struct ob_pass_factors *factors) {
  *factors = pass.factors;
  const float rate = pass.rate ? *pass.rate : pass.learning_rate;
  factors->learning_rate =
      pass.learning_rates ? pass.learning_rates[piece] : rate * pass.rate_factors[piece];
  factors->weight_decay = pass.weight_decays[piece];
  factors->scaling = pass.scalings ? pass.scalings[piece] : 1;
  const float of_rates = pass.sums_of_rates ? pass.rate_factors[piece] : 1;
  factors->rate_sum *= of_rates;
  factors->anchor_decay = factors->weight_decay * (factors->anchor_decay * of_rates);
  if (pass.counted) {
    factors->adam.momentum_factor = plan.state->momentum_factor;
    factors->adam.variance_factor = plan.state->variance_factor;
  }
}

/* Sets the addresses of a member's messages about the block: of the call in flight, and of the last
 * one. */
template <enum ob_pass_kind kind>
static __device__ inline void point_to_messages(const struct ob_cuda_plan &plan,
                                                const struct ob_cuda_pass &pass,
                                                const struct location &location, struct run *run) {
  const uint32_t now = plan.state->now;
  const struct ob_view in = view_of(result_of(plan, next_copy(plan, now), blockIdx.y), location);
  run->message = in.words + location.word;
  run->message_scale = ob_pass_scale(kind, scale_of(in, location), &run->factors);
  if (!(ob_pass_reads(kind) & OB_MASK(OB_LAST)))
    return;
  if (pass.last_values && !(pass.only_at_first && plan.state->outcome.calls > 0))
    return;
  const struct ob_view last = view_of(result_of(plan, last_copy(plan, now), blockIdx.y), location);
  run->last = last.words + location.word;
  run->last_scale = scale_of(last, location) / run->factors.scaling * pass.last_decay;
}

/* --- Elements */

/* Returns the index of a lane's element number `word`. */
static __device__ inline unsigned element_at(unsigned word) {
  return word * OB_LANES + lane_number();
}

/* Returns true if an element exists. With `whole` all do, so that no access has a condition. */
template <bool whole> static __device__ inline bool has_element(const struct run &run, unsigned i) {
  return whole || i < run.count;
}

/* Returns the warp's own tile, in which gradients of 16 bits pass from lane to lane. */
template <unsigned words> static __device__ inline uint16_t *tile_of_warp() {
  __shared__ uint4 tiles[warps_a_block][words * OB_LANES / 8];
  return (uint16_t *)tiles[threadIdx.x / OB_LANES];
}

/* Loads gradients. Of gradients of 16 bits, 16 bytes are loaded at once, or 8 if there are few
 * words, and shared memory passes them to their lanes. Gradients without that alignment are loaded
 * one by one. */
template <onebit_dtype_t dtype, bool whole, unsigned words>
static __device__ inline void load_gradients(const struct run &run, unsigned word,
                                             struct ob_element (&e)[words]) {
  constexpr unsigned width = words < 8 ? words : 8, parts = words / width;
  if (whole && size_of<dtype> == 2 && is_aligned(run.gradient, 2 * width)) {
    uint32_t raw[parts][width / 2];
    OB_UNROLL
    for (unsigned k = 0; k < parts; k++)
      load_raw((const uint16_t *)run.gradient + word * OB_LANES + part_at<width>(k), raw[k]);
    uint16_t *const tile = tile_of_warp<words>();
    OB_UNROLL
    for (unsigned k = 0; k < parts; k++)
      store_raw_shared(tile + part_at<width>(k), raw[k]);
    __syncwarp();
    OB_UNROLL
    for (unsigned w = 0; w < words; w++)
      e[w].at[OB_GRADIENT] = widen_value<dtype>(tile[element_at(w)]);
    __syncwarp(); /* the next elements are stored in the same memory */
    return;
  }
  OB_UNROLL
  for (unsigned w = 0; w < words; w++) {
    const unsigned i = element_at(word + w);
    e[w].at[OB_GRADIENT] = has_element<whole>(run, i) ? load_one<dtype>(run.gradient, i) : 0;
  }
}

template <bool whole, unsigned words>
static __device__ inline void load_gradients(const struct run &run, unsigned word,
                                             struct ob_element (&e)[words]) {
  if (!run.gradient)
    return;
  if (run.gradient_dtype == ONEBIT_FLOAT32)
    load_gradients<ONEBIT_FLOAT32, whole>(run, word, e);
  else if (run.gradient_dtype == ONEBIT_BFLOAT16)
    load_gradients<ONEBIT_BFLOAT16, whole>(run, word, e);
  else
    load_gradients<ONEBIT_FLOAT16, whole>(run, word, e);
}

/* Decodes the signs: all lanes read the same word. */
template <int slot, bool whole, unsigned words>
static __device__ inline void load_message(const struct run &run, const uint32_t *message,
                                           float scale, unsigned word,
                                           struct ob_element (&e)[words]) {
  OB_UNROLL
  for (unsigned w = 0; w < words; w++) {
    const uint32_t signs = whole || (word + w) * OB_LANES < run.count ? message[word + w] : 0;
    e[w].at[slot] = ob_decode(signs >> lane_number() & 1, scale);
  }
}

template <bool whole, unsigned words>
static __device__ inline void load_array(const struct run &run, const float *array, int slot,
                                         unsigned word, struct ob_element (&e)[words]) {
  OB_UNROLL
  for (unsigned w = 0; w < words; w++) {
    const unsigned i = element_at(word + w);
    e[w].at[slot] = has_element<whole>(run, i) ? __ldcs(&array[i]) : 0;
  }
}

template <enum ob_pass_kind kind, bool whole, unsigned words>
static __device__ inline void load_elements(const struct run &run, unsigned word,
                                            struct ob_element (&e)[words]) {
  const unsigned reads = ob_pass_reads(kind);
  OB_UNROLL
  for (int slot = 0; slot <= OB_PARAMETER; slot++)
    if (reads & OB_MASK(slot) && has_array(run.arrays, slot))
      load_array<whole>(run, run.arrays[slot], slot, word, e);
  if (reads & OB_MASK(OB_GRADIENT))
    load_gradients<whole>(run, word, e);
  if (reads & OB_MASK(OB_MESSAGE))
    load_message<OB_MESSAGE, whole>(run, run.message, run.message_scale, word, e);
  if (reads & OB_MASK(OB_LAST) && run.last)
    load_message<OB_LAST, whole>(run, run.last, run.last_scale, word, e);
  else if (reads & OB_MASK(OB_LAST))
    load_array<whole>(run, run.last_values, OB_LAST, word, e);
}

template <enum ob_pass_kind kind>
static __device__ inline void store_element(const struct run &run, unsigned i,
                                            const struct ob_element &e) {
  OB_UNROLL
  for (int slot = 0; slot <= OB_PARAMETER; slot++)
    if (ob_pass_writes(kind) & OB_MASK(slot) && has_array(run.arrays, slot))
      __stcs(&run.arrays[slot][i], e.at[slot]);
}

/* Stores parameters in their own type, if the arrays hold the master values. A warp stores 64 bytes
 * at once, which are two whole sectors. */
template <onebit_dtype_t dtype, bool whole, unsigned words>
static __device__ inline void store_copies(const struct run &run, unsigned word,
                                           const struct ob_element (&e)[words]) {
  OB_UNROLL
  for (unsigned w = 0; w < words; w++)
    if (has_element<whole>(run, element_at(word + w)))
      store_one<dtype>(run.copy, element_at(word + w), ob_bound(e[w].at[OB_PARAMETER], dtype));
}

template <bool whole, unsigned words>
static __device__ inline void store_copies(const struct run &run, unsigned word,
                                           const struct ob_element (&e)[words]) {
  if (run.copy_dtype == ONEBIT_FLOAT32)
    store_copies<ONEBIT_FLOAT32, whole>(run, word, e);
  else if (run.copy_dtype == ONEBIT_BFLOAT16)
    store_copies<ONEBIT_BFLOAT16, whole>(run, word, e);
  else
    store_copies<ONEBIT_FLOAT16, whole>(run, word, e);
}

template <enum ob_pass_kind kind>
static __device__ inline void add_element(const struct ob_element &e, float (&sums)[OB_SUMS]) {
  const unsigned summed = ob_pass_sums(kind);
  OB_UNROLL
  for (int k = 0; k < OB_LARGEST; k++)
    if (summed & OB_MASK(k))
      sums[k] += e.sum[k];
  if (summed & OB_MASK(OB_LARGEST))
    sums[OB_LARGEST] = e.sum[OB_LARGEST] < sums[OB_LARGEST] ? e.sum[OB_LARGEST] : sums[OB_LARGEST];
}

template <enum ob_pass_kind kind, bool whole>
static __device__ inline void pass_group(const struct run &run, unsigned word,
                                         float (&sums)[OB_SUMS]) {
  struct ob_element e[words_at_once<kind>] = {};
  load_elements<kind, whole>(run, word, e);
  OB_UNROLL
  for (unsigned w = 0; w < words_at_once<kind>; w++) {
    if (!has_element<whole>(run, element_at(word + w)))
      continue;
    e[w] = ob_pass_element(kind, e[w], &run.factors);
    store_element<kind>(run, element_at(word + w), e[w]);
    add_element<kind>(e[w], sums);
  }
  if (ob_pass_writes(kind) & OB_MASK(OB_PARAMETER) && run.copy)
    store_copies<whole>(run, word, e);
}

template <enum ob_pass_kind kind>
static __device__ inline void pass_elements(const struct run &run, float (&sums)[OB_SUMS]) {
  constexpr unsigned words = words_at_once<kind>;
  for (unsigned word = 0; word * OB_LANES < run.count; word += words)
    if ((word + words) * OB_LANES <= run.count)
      pass_group<kind, true>(run, word, sums);
    else
      pass_group<kind, false>(run, word, sums);
}

/* --- Sums */

template <enum ob_pass_kind kind>
static __device__ inline void store_sums(const struct ob_cuda_pass &pass, size_t block,
                                         const float (&sums)[OB_SUMS]) {
  OB_UNROLL
  for (int k = 0; k < OB_SUMS; k++) {
    if (!(ob_pass_sums(kind) & OB_MASK(k)) || !pass.sums[k])
      continue;
    const float sum = k == OB_LARGEST ? 1 / min_lane(sums[k]) : sum_lanes(sums[k]);
    if (lane_number() == 0)
      pass.sums[k][block] = (double)sum;
  }
}

/* --- Kernels */

/* Finds the warp's block of a message, or of the layout if the pass reads no message. Returns false
 * if there is no such block. */
template <enum ob_pass_kind kind>
static __device__ inline bool find_block(const struct ob_cuda_plan &plan,
                                         struct location *location) {
  if (ob_pass_reads(kind) & OB_MASK(OB_MESSAGE))
    return find_location(plan, segment_of(plan, blockIdx.y), location);
  size_t piece = 0;
  location->number = warp_number();
  if (location->number >= plan.geometry.layout.blocks)
    return false;
  location->block = ob_layout_block(&plan.geometry.layout, location->number, &piece);
  return true;
}

/* grid.y is the member whose result is applied. */
template <enum ob_pass_kind kind>
static __global__ void __launch_bounds__(threads_a_block, blocks_at_once)
    pass_kernel(const __grid_constant__ struct ob_cuda_plan plan,
                const __grid_constant__ struct ob_cuda_pass pass) {
  await_kernels_ahead();
  struct location location;
  if ((plan.state && plan.state->stop) || !find_block<kind>(plan, &location))
    return;
  struct run run = {};
  float sums[OB_SUMS];
  OB_UNROLL
  for (int k = 0; k < OB_SUMS; k++)
    sums[k] = ob_sum_initial_value(k);
  point_to_arrays<kind>(pass, location.block, &run);
  set_factors(plan, pass, location.block.piece, &run.factors);
  if (ob_pass_divides_gradients(kind))
    run.factors.floor =
        ob_divisor_floor(pass.variances[location.number], location.block.valid, &pass.factors);
  if (ob_pass_reads(kind) & OB_MASK(OB_MESSAGE))
    point_to_messages<kind>(plan, pass, location, &run);
  const bool padding = (ob_pass_reads(kind) | ob_pass_writes(kind)) & OB_MASK(OB_PARAMETER) &&
                       !run.arrays[OB_PARAMETER];
  run.count = padding ? 0 : (unsigned)location.block.valid;
  pass_elements<kind>(run, sums);
  store_sums<kind>(pass, location.number, sums);
}

using pass_function = void(struct ob_cuda_plan, struct ob_cuda_pass);

/* Sharded state is only supported in host memory (optimizers/methods/shards.c), so its passes have
 * no kernel. */
template <enum ob_pass_kind kind> static constexpr pass_function *kernel_or_none() {
  if constexpr (kind == OB_PASS_SHARD || kind == OB_PASS_SHARD_MOVE)
    return NULL;
  else
    return pass_kernel<kind>;
}

template <size_t... kind>
static pass_function *kernel_of(enum ob_pass_kind wanted, std::index_sequence<kind...>) {
  static pass_function *const kernels[] = {kernel_or_none<(enum ob_pass_kind)kind>()...};
  return kernels[wanted];
}

static pass_function *kernel_of(enum ob_pass_kind kind) {
  return kernel_of(kind, std::make_index_sequence<OB_PASSES>());
}

cudaError_t ob_cuda_apply(struct ob_cuda_plan plan, struct ob_cuda_pass pass, size_t chunk,
                          cudaStream_t stream) {
  return launch_early_kernel(kernel_of(pass.kind), plan.max_blocks, plan.geometry.members, stream,
                             select_chunk(plan, chunk), pass);
}

cudaError_t ob_cuda_pass_over(struct ob_cuda_plan plan, struct ob_cuda_pass pass,
                              cudaStream_t stream) {
  return launch_early_kernel(kernel_of(pass.kind), plan.geometry.layout.blocks, 1, stream, plan,
                             pass);
}
