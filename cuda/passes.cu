/*
 * The passes of the optimizers: a loop around each row of compression/passes.h.
 *
 * A warp takes a block, and lane l its elements l, l + 32, ...: so a word of signs has one bit for
 * every lane, lane sums are the ones that numerics.h defines, and it does not matter where in a
 * buffer a tensor begins. Eight words are loaded at once, or four: that is 32 bytes in flight a
 * thread with one array, 96 with six, and 24 warps of the former are what a multiprocessor needs
 * (device.cuh); where there is one array only, more are resident. An access of 4 bytes is an
 * instruction for 128 bytes, of which an H200 could issue nine times as many as its memory can
 * serve; the arithmetic of the largest pass, about 100 instructions for 1 KiB, fits beside.
 *
 * Bytes an element, float32: 4 for each array that ob_pass_reads and ob_pass_writes name, 1/8 for a
 * message.
 *
 *   apply (step)            12.13 (8.13)   lamb         28      zero-one         20.13
 *   step (its norms)        8.13 (4.13)    lion         20
 *   adam                    28             lamb move    12      zero-one local   24
 *   frozen, share move      24             lamb freeze  20      zero-one meet    24
 *   freeze, freeze step     16             lamb fresh   16.25   zero-one met     20.13
 *   sgd                     20             lamb frozen  32      zero-one freeze  12
 *   sgd freeze              8              share        12      squares, power   4
 *
 * 0/1 Adam in profile deepspeed reads and writes what was moved, too. Where parameters have master
 * values, a pass that writes them writes 2 more. The ceiling is the
 * card's copy bandwidth over these.
 */
#include <utility>

#include "cuda/location.cuh"

/* Fewer of many arrays, for which there are not the registers. */
template <enum ob_pass_kind kind>
constexpr unsigned words_at_once =
    kind == OB_PASS_LAMB_FRESH || kind == OB_PASS_LAMB_FROZEN || kind == OB_PASS_ZERO_ONE_STORE ? 4
                                                                                                : 8;

/* What a warp has of a block: where its elements begin. There need not be OB_MOVED, which reads as
 * zeros then. */
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

static __device__ inline bool has(float *const *arrays, int slot) {
  return slot != OB_MOVED || arrays[OB_MOVED];
}

/* --- Where things are, as blocks.c has it */

template <enum ob_pass_kind kind>
static __device__ inline void point_to_arrays(const struct ob_cuda_pass &pass,
                                              const struct ob_block &block, struct run *run) {
  const unsigned reads = ob_pass_reads(kind), uses = reads | ob_pass_writes(kind);
  const size_t at = (block.word - pass.first_word) * OB_LANES, piece = block.piece;
  OB_UNROLL
  for (int slot = 0; slot < OB_ARRAYS; slot++)
    if (uses & OB_MASK(slot) && has(pass.arrays, slot))
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

/* The messages of a member about the block: of the call in flight, and of the last one. */
template <enum ob_pass_kind kind>
static __device__ inline void point_to_messages(const struct ob_cuda_plan &plan,
                                                const struct ob_cuda_pass &pass,
                                                const struct location &location, struct run *run) {
  const uint32_t now = plan.state->now;
  const struct ob_view in = view_of(result_of(plan, next_of(plan, now), blockIdx.y), location);
  run->message = in.words + location.word;
  run->message_scale = ob_pass_scale(kind, scale_of(in, location), &run->factors);
  if (!(ob_pass_reads(kind) & OB_MASK(OB_LAST)))
    return;
  if (pass.last_values && !(pass.only_at_first && plan.state->outcome.calls > 0))
    return;
  const struct ob_view last = view_of(result_of(plan, last_of(plan, now), blockIdx.y), location);
  run->last = last.words + location.word;
  run->last_scale = scale_of(last, location) / run->factors.scaling * pass.last_decay;
}

/* --- Elements */

/* Element number `word` of a lane. */
static __device__ inline unsigned element_at(unsigned word) {
  return word * OB_LANES + lane_number();
}

template <onebit_dtype_t dtype, unsigned words>
static __device__ inline void load_gradients(const struct run &run, unsigned word,
                                             struct ob_element (&e)[words]) {
  OB_UNROLL
  for (unsigned w = 0; w < words; w++) {
    const unsigned i = element_at(word + w);
    e[w].at[OB_GRADIENT] = i < run.count ? ob_load(run.gradient, i, dtype) : 0;
  }
}

template <unsigned words>
static __device__ inline void load_gradients(const struct run &run, unsigned word,
                                             struct ob_element (&e)[words]) {
  if (!run.gradient)
    return;
  if (run.gradient_dtype == ONEBIT_FLOAT32)
    load_gradients<ONEBIT_FLOAT32>(run, word, e);
  else if (run.gradient_dtype == ONEBIT_BFLOAT16)
    load_gradients<ONEBIT_BFLOAT16>(run, word, e);
  else
    load_gradients<ONEBIT_FLOAT16>(run, word, e);
}

/* What the signs stand for: all lanes read the same word. */
template <int slot, unsigned words>
static __device__ inline void load_message(const uint32_t *message, float scale, unsigned word,
                                           unsigned count, struct ob_element (&e)[words]) {
  OB_UNROLL
  for (unsigned w = 0; w < words; w++) {
    const uint32_t signs = (word + w) * OB_LANES < count ? message[word + w] : 0;
    e[w].at[slot] = ob_decode(signs >> lane_number() & 1, scale);
  }
}

template <unsigned words>
static __device__ inline void load_array(const float *array, int slot, unsigned word,
                                         unsigned count, struct ob_element (&e)[words]) {
  OB_UNROLL
  for (unsigned w = 0; w < words; w++)
    e[w].at[slot] = element_at(word + w) < count ? __ldcs(&array[element_at(word + w)]) : 0;
}

template <enum ob_pass_kind kind, unsigned words>
static __device__ inline void load_elements(const struct run &run, unsigned word,
                                            struct ob_element (&e)[words]) {
  const unsigned reads = ob_pass_reads(kind);
  OB_UNROLL
  for (int slot = 0; slot <= OB_PARAMETER; slot++)
    if (reads & OB_MASK(slot) && has(run.arrays, slot))
      load_array(run.arrays[slot], slot, word, run.count, e);
  if (reads & OB_MASK(OB_GRADIENT))
    load_gradients(run, word, e);
  if (reads & OB_MASK(OB_MESSAGE))
    load_message<OB_MESSAGE>(run.message, run.message_scale, word, run.count, e);
  if (reads & OB_MASK(OB_LAST) && run.last)
    load_message<OB_LAST>(run.last, run.last_scale, word, run.count, e);
  else if (reads & OB_MASK(OB_LAST))
    load_array(run.last_values, OB_LAST, word, run.count, e);
}

template <enum ob_pass_kind kind>
static __device__ inline void store_element(const struct run &run, unsigned i,
                                            const struct ob_element &e) {
  const unsigned writes = ob_pass_writes(kind);
  OB_UNROLL
  for (int slot = 0; slot <= OB_PARAMETER; slot++)
    if (writes & OB_MASK(slot) && has(run.arrays, slot))
      __stcs(&run.arrays[slot][i], e.at[slot]);
  if (writes & OB_MASK(OB_PARAMETER) && run.copy)
    ob_store(run.copy, i, run.copy_dtype, ob_bound(e.at[OB_PARAMETER], run.copy_dtype));
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

template <enum ob_pass_kind kind>
static __device__ inline void pass_elements(const struct run &run, float (&sums)[OB_SUMS]) {
  constexpr unsigned words = words_at_once<kind>;
  for (unsigned word = 0; word * OB_LANES < run.count; word += words) {
    struct ob_element e[words] = {};
    load_elements<kind>(run, word, e);
    OB_UNROLL
    for (unsigned w = 0; w < words; w++) {
      if (element_at(word + w) >= run.count)
        continue;
      e[w] = ob_pass_element(kind, e[w], &run.factors);
      store_element<kind>(run, element_at(word + w), e[w]);
      add_element<kind>(e[w], sums);
    }
  }
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

/* Finds the block of a message; or of the layout, where the pass takes none. False: there is no
 * such block. */
template <enum ob_pass_kind kind>
static __device__ inline bool find(const struct ob_cuda_plan &plan, struct location *location) {
  if (ob_pass_reads(kind) & OB_MASK(OB_MESSAGE))
    return find_location(plan, segment_of(plan, blockIdx.y), location);
  size_t piece = 0;
  location->number = warp_number();
  if (location->number >= plan.geometry.layout.blocks)
    return false;
  location->block = ob_layout_block(&plan.geometry.layout, location->number, &piece);
  return true;
}

/* grid.y is the member whose result it is. */
template <enum ob_pass_kind kind>
static __global__ void __launch_bounds__(threads_a_block, blocks_at_once)
    pass_kernel(const __grid_constant__ struct ob_cuda_plan plan,
                const __grid_constant__ struct ob_cuda_pass pass) {
  struct location location;
  if ((plan.state && plan.state->stop) || !find<kind>(plan, &location))
    return;
  struct run run = {};
  float sums[OB_SUMS];
  OB_UNROLL
  for (int k = 0; k < OB_SUMS; k++)
    sums[k] = ob_sum_start(k);
  point_to_arrays<kind>(pass, location.block, &run);
  set_factors(plan, pass, location.block.piece, &run.factors);
  if (ob_pass_reads(kind) & OB_MASK(OB_MESSAGE))
    point_to_messages<kind>(plan, pass, location, &run);
  const bool padding = (ob_pass_reads(kind) | ob_pass_writes(kind)) & OB_MASK(OB_PARAMETER) &&
                       !run.arrays[OB_PARAMETER];
  run.count = padding ? 0 : (unsigned)location.block.valid;
  pass_elements<kind>(run, sums);
  store_sums<kind>(pass, location.number, sums);
}

using pass_function = void(struct ob_cuda_plan, struct ob_cuda_pass);

template <size_t... kind>
static pass_function *kernel_of(enum ob_pass_kind wanted, std::index_sequence<kind...>) {
  static pass_function *const kernels[] = {pass_kernel<(enum ob_pass_kind)kind>...};
  return kernels[wanted];
}

static pass_function *kernel_of(enum ob_pass_kind kind) {
  return kernel_of(kind, std::make_index_sequence<OB_PASSES>());
}

cudaError_t ob_cuda_apply(struct ob_cuda_plan plan, struct ob_cuda_pass pass, size_t chunk,
                          cudaStream_t stream) {
  return launch(kernel_of(pass.kind), plan.max_blocks, plan.geometry.members, stream,
                of_chunk(plan, chunk), pass);
}

cudaError_t ob_cuda_pass_over(struct ob_cuda_plan plan, struct ob_cuda_pass pass,
                              cudaStream_t stream) {
  return launch(kernel_of(pass.kind), plan.geometry.layout.blocks, 1, stream, plan, pass);
}
