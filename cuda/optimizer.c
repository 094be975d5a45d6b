/* Optimizers on a device: what their kernels are told, and their passes on the step's stream. */
#include "optimizers/optimizer.h"

#include "base/error.h"
#include "base/memory.h"
#include "cuda/device.h"
#include "onebit/cuda.h"

struct ob_unit_device {
  const struct onebit_optimizer *optimizer;
  int number;
  /* By piece, in memory of the device. */
  float **parameters;
  void **copies, **gradients, **means;
  float *factors, *weight_decays, *scalings;
  bool counted;  /* in this step the device has the bias corrections */
  double *total; /* one, of sums */
  /* All units' states, the first unit has them: of what they send dense; and when others send
   * bits. */
  struct ob_cuda_state **states;
  cudaStream_t own; /* for steps without a stream */
  cudaEvent_t last; /* the end of the latest step on any stream; the first unit's is used */
};

/* --- Made and given back -----------------------------------------------------------------------*/

static onebit_status_t out_of_memory(const struct ob_unit_device *device) {
  return ob_error(ONEBIT_ERROR_MEMORY, "no memory on CUDA device %d for an optimizer",
                  device->number);
}

/* A copy on the device. */
static void *copied(struct onebit_optimizer *optimizer, const void *values, size_t count,
                    size_t size) {
  void *memory = ob_memory_cuda.allocate(count, size);
  optimizer->own_bytes += count * size;
  if (memory && ob_memory_cuda.copy(memory, values, count * size) == ONEBIT_OK)
    return memory;
  ob_memory_cuda.release(memory);
  return NULL;
}

static onebit_status_t copy_pieces(struct onebit_optimizer *optimizer, struct ob_unit *unit) {
  struct ob_unit_device *device = unit->device;
  size_t pieces = unit->bits->layout.pieces;
  device->parameters = copied(optimizer, unit->parameters, pieces, sizeof *device->parameters);
  device->copies = copied(optimizer, unit->copies, pieces, sizeof *device->copies);
  device->gradients = copied(optimizer, unit->gradients, pieces, sizeof *device->gradients);
  device->means = copied(optimizer, unit->means, pieces, sizeof *device->means);
  device->factors = copied(optimizer, unit->factors, pieces, sizeof(float));
  device->weight_decays = copied(optimizer, unit->weight_decays, pieces, sizeof(float));
  device->scalings = copied(optimizer, unit->scalings, pieces, sizeof(float));
  device->total = ob_memory_cuda.allocate(1, sizeof *device->total);
  return device->parameters && device->copies && device->gradients && device->means &&
                 device->factors && device->weight_decays && device->scalings && device->total
             ? ONEBIT_OK
             : out_of_memory(device);
}

static onebit_status_t create_here(struct onebit_optimizer *optimizer, struct ob_unit *unit) {
  OB_TRY(copy_pieces(optimizer, unit));
  OB_TRY_CUDA(cudaStreamCreateWithFlags(&unit->device->own, cudaStreamNonBlocking));
  OB_TRY_CUDA(cudaEventCreateWithFlags(&unit->device->last, cudaEventDisableTiming));
  return ONEBIT_OK;
}

static onebit_status_t create(struct onebit_optimizer *optimizer, struct ob_unit *unit) {
  unit->device = ob_allocate(1, sizeof *unit->device);
  if (!unit->device)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for an optimizer");
  unit->device->optimizer = optimizer;
  unit->device->number = unit->bits->device->number;
  int before = ob_cuda_enter(unit->device->number);
  onebit_status_t status = create_here(optimizer, unit);
  ob_cuda_leave(before);
  return status;
}

/* Steps may still be on a stream that use what is given back: cudaFree waits for them. */
static void destroy(struct ob_unit *unit) {
  struct ob_unit_device *device = unit->device;
  if (!device)
    return;
  int before = ob_cuda_enter(device->number);
  if (device->last)
    cudaEventDestroy(device->last);
  if (device->own)
    cudaStreamDestroy(device->own);
  ob_memory_cuda.release(device->parameters);
  ob_memory_cuda.release(device->copies);
  ob_memory_cuda.release(device->gradients);
  ob_memory_cuda.release(device->means);
  ob_memory_cuda.release(device->factors);
  ob_memory_cuda.release(device->weight_decays);
  ob_memory_cuda.release(device->scalings);
  ob_memory_cuda.release(device->total);
  ob_memory_cuda.release(device->states);
  ob_release(device);
  unit->device = NULL;
  ob_cuda_leave(before);
}

static onebit_status_t check(const char *name, const void *array) {
  int number;
  OB_TRY(ob_cuda_current(&number));
  return ob_cuda_check(number, name, array);
}

static onebit_status_t repoint(struct onebit_optimizer *optimizer, struct ob_unit *unit,
                               size_t piece) {
  struct ob_unit_device *device = unit->device;
  int before = ob_cuda_enter(device->number);
  onebit_status_t status = ob_memory_cuda.copy(&device->gradients[piece], &unit->gradients[piece],
                                               sizeof *device->gradients);
  (void)optimizer;
  ob_cuda_leave(before);
  return status;
}

/* --- A step ------------------------------------------------------------------------------------*/

static cudaStream_t stream_of(const struct onebit_optimizer *optimizer,
                              const struct ob_unit *unit) {
  return optimizer->step.on_stream ? optimizer->step.stream : unit->device->own;
}

/* What the unit sends its gradients with in this step; NULL: nothing. */
static const struct onebit_plan *plan_of(const struct onebit_optimizer *optimizer,
                                         const struct ob_unit *unit) {
  enum ob_exchange exchange = ob_unit_exchange(optimizer, unit);
  return exchange == OB_EXCHANGE_NONE   ? NULL
         : exchange == OB_EXCHANGE_BITS ? unit->bits
                                        : unit->dense;
}

/* The passes of a step follow its exchange, whose plan knows nothing of them: what begins next, on
 * another stream or on the plan's own, has to wait for them too, and the counting for the plan.
 * What is captured has no place in time yet. */
static onebit_status_t follow(const struct onebit_optimizer *optimizer,
                              const struct ob_unit *unit) {
  const struct onebit_plan *plan = plan_of(optimizer, unit);
  cudaEvent_t last = optimizer->units[0].device->last;
  cudaStream_t stream = optimizer->step.stream;
  if (!optimizer->step.on_stream) {
    OB_TRY_CUDA(cudaEventSynchronize(last));
  } else if (!ob_cuda_is_capturing(stream)) {
    OB_TRY(ob_device_check_stream(plan, stream));
    OB_TRY_CUDA(cudaStreamWaitEvent(stream, last, 0));
    if (optimizer->deferred)
      OB_TRY_CUDA(cudaStreamWaitEvent(stream, plan->device->last, 0));
  }
  return ONEBIT_OK;
}

/* Where the host does not know how many steps were made, the device counts: those of this stage
 * are calls of one plan, and before it came those of the other. */
static onebit_status_t count_step(struct onebit_optimizer *optimizer, struct ob_unit *unit) {
  const struct ob_moments *moments = &optimizer->moments;
  const struct onebit_plan *plan = plan_of(optimizer, unit);
  unit->device->counted = optimizer->deferred && !moments->no_bias_correction;
  if (unit->device->counted)
    OB_TRY_CUDA(ob_cuda_adam_count(plan->device->kernel, moments->beta1, moments->beta2,
                                   plan == unit->bits ? optimizer->frozen_at : 0,
                                   stream_of(optimizer, unit)));
  return ONEBIT_OK;
}

static onebit_status_t prepare(struct onebit_optimizer *optimizer, struct ob_unit *unit,
                               struct ob_call *call) {
  struct ob_unit_device *device = unit->device;
  bool given = call->source.inputs == unit->gradients;
  call->device_inputs = given ? device->gradients : device->means;
  call->device_outputs = call->outputs ? device->means : NULL;
  if (call->source.scalings)
    call->source.scalings = device->scalings;
  int before = ob_cuda_enter(device->number);
  onebit_status_t status = follow(optimizer, unit);
  if (status == ONEBIT_OK)
    status = count_step(optimizer, unit);
  ob_cuda_leave(before);
  return status;
}

static onebit_status_t list_states(struct onebit_optimizer *optimizer) {
  struct ob_unit_device *first = optimizer->units[0].device;
  size_t count = optimizer->unit_count;
  struct ob_cuda_state **states = ob_allocate(2 * count, sizeof *states);
  for (size_t u = 0; states && u < count; u++) {
    const struct ob_unit *unit = &optimizer->units[u];
    states[u] = unit->dense->device->kernel.state;
    states[count + u] = unit->uncompressed ? states[u] : unit->bits->device->kernel.state;
  }
  if (states)
    first->states = copied(optimizer, states, 2 * count, sizeof *states);
  ob_release(states);
  return first->states ? ONEBIT_OK : out_of_memory(first);
}

/* Nothing is applied in any unit unless all are well: where the host does not know, the device sees
 * to that. The list is made in the first step, which is one of the warm-up and so in no graph. */
static onebit_status_t join(struct onebit_optimizer *optimizer) {
  struct ob_unit *first = optimizer->units;
  bool bits = optimizer->step.exchange == OB_EXCHANGE_BITS;
  if (!optimizer->deferred || optimizer->unit_count < 2)
    return ONEBIT_OK;
  if (!first->device->states)
    OB_TRY(list_states(optimizer));
  OB_TRY_CUDA(ob_cuda_join(first->device->states + (bits ? optimizer->unit_count : 0),
                           optimizer->unit_count, stream_of(optimizer, first)));
  return ONEBIT_OK;
}

/* Of a sink, what is by piece is the device's. */
struct ob_cuda_pass ob_device_pass(const struct ob_pass_sink *sink) {
  const struct ob_unit_device *device = sink->device;
  struct ob_cuda_pass pass = {
      .kind = sink->kind,
      .first_word = sink->first_word,
      .parameters = device->parameters,
      .copies = sink->copies ? device->copies : NULL,
      .gradients = device->gradients,
      .copy_dtype = sink->copy_dtype,
      .gradient_dtype = sink->gradient_dtype,
      .learning_rate = device->optimizer->step.learning_rate,
      .rate_factors = device->factors,
      .weight_decays = device->weight_decays,
      .sums_of_rates = sink->rate_factors != NULL,
      .scalings = sink->scalings ? device->scalings : NULL,
      .last_values = sink->last_values,
      .last_decay = sink->last_decay,
      .factors = sink->factors,
      .counted = device->counted,
  };
  for (int slot = 0; slot < OB_ARRAYS; slot++)
    pass.arrays[slot] = sink->arrays[slot];
  for (int k = 0; k < OB_SUMS; k++)
    pass.sums[k] = sink->sums[k];
  return pass;
}

/* Where the host does not know, the exchange of the step that is being put on a stream may have
 * been stopped, and so must what follows it. What only adds up has nothing to stop. */
static struct ob_cuda_state *state_of(const struct onebit_optimizer *optimizer,
                                      const struct ob_unit *unit, enum ob_pass_kind kind) {
  const struct onebit_plan *plan = plan_of(optimizer, unit);
  bool follows = optimizer->deferred && optimizer->step.on_stream && ob_pass_writes(kind);
  return follows && plan ? plan->device->kernel.state : NULL;
}

static onebit_status_t launch(struct onebit_optimizer *optimizer, struct ob_unit *unit,
                              const struct ob_pass_sink *sink) {
  struct ob_cuda_plan plan = unit->bits->device->kernel;
  struct ob_cuda_pass pass = ob_device_pass(sink);
  plan.state = state_of(optimizer, unit, sink->kind);
  pass.counted &= plan.state != NULL;
  OB_TRY_CUDA(ob_cuda_pass_over(plan, pass, stream_of(optimizer, unit)));
  return ONEBIT_OK;
}

static onebit_status_t pass(struct onebit_optimizer *optimizer, struct ob_unit *unit,
                            const struct ob_pass_sink *sink) {
  int before = ob_cuda_enter(unit->device->number);
  onebit_status_t status = launch(optimizer, unit, sink);
  ob_cuda_leave(before);
  return status;
}

static onebit_status_t add_up(struct onebit_optimizer *optimizer, struct ob_unit *unit, int which,
                              size_t first, size_t end, double *sum) {
  cudaStream_t stream = stream_of(optimizer, unit);
  double *total = unit->device->total;
  OB_TRY_CUDA(ob_cuda_total(unit->sums[which], which, first, end, total, stream));
  OB_TRY_CUDA(cudaMemcpyAsync(sum, total, sizeof *sum, cudaMemcpyDeviceToHost, stream));
  OB_TRY_CUDA(cudaStreamSynchronize(stream));
  return ONEBIT_OK;
}

static onebit_status_t sum(struct onebit_optimizer *optimizer, struct ob_unit *unit, int which,
                           size_t first, size_t end, double *value) {
  int before = ob_cuda_enter(unit->device->number);
  onebit_status_t status = add_up(optimizer, unit, which, first, end, value);
  ob_cuda_leave(before);
  return status;
}

/* Of one unit, where there is no stream of the caller's. */
static cudaError_t wait_for(struct ob_unit *unit) {
  unit->bits->place->settled(unit->bits, true); /* a held call was applied after it ended */
  return cudaStreamSynchronize(unit->device->own);
}

static cudaError_t record_end(struct ob_unit *first, cudaStream_t stream) {
  return ob_cuda_is_capturing(stream) ? cudaSuccess : cudaEventRecord(first->device->last, stream);
}

static onebit_status_t finish(struct onebit_optimizer *optimizer) {
  cudaError_t error = cudaSuccess;
  struct ob_unit *first = optimizer->units;
  for (size_t u = 0; error == cudaSuccess && u < optimizer->unit_count; u++) {
    int before = ob_cuda_enter(first[u].device->number);
    if (!optimizer->step.on_stream)
      error = wait_for(&first[u]);
    else if (u == 0)
      error = record_end(first, optimizer->step.stream);
    ob_cuda_leave(before);
  }
  return error == cudaSuccess ? ONEBIT_OK : ob_cuda_error(error, "the end of a step");
}

static onebit_status_t wait_for_passes(struct onebit_optimizer *optimizer) {
  if (optimizer->unit_count)
    OB_TRY_CUDA(cudaEventSynchronize(optimizer->units[0].device->last));
  return ONEBIT_OK;
}

/* Steps are those that any unit's exchanges ended well in. */
static void counts(const struct onebit_optimizer *optimizer, uint64_t *steps, uint64_t *skipped) {
  const struct ob_unit *unit = &optimizer->units[0];
  const struct ob_cuda_outcome *dense = &unit->dense->device->seen->outcome;
  const struct ob_cuda_outcome *bits = &unit->bits->device->seen->outcome;
  *steps = (uint64_t)dense->calls + bits->calls;
  *skipped = (uint64_t)dense->skipped + bits->skipped;
}

const struct ob_optimizer_place ob_optimizer_place_cuda = {.check = check,
                                                           .create = create,
                                                           .destroy = destroy,
                                                           .prepare = prepare,
                                                           .join = join,
                                                           .pass = pass,
                                                           .sum = sum,
                                                           .repoint = repoint,
                                                           .counts = counts,
                                                           .finish = finish,
                                                           .wait = wait_for_passes};

/* --- The public calls --------------------------------------------------------------------------*/

/* What is captured must not depend on what the host has yet to learn. */
static onebit_status_t check_capture(const struct onebit_optimizer *optimizer,
                                     cudaStream_t stream) {
  if (ob_cuda_is_capturing(stream) && !optimizer->frozen_at)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "stream is capturing a graph, and the warm-up is not known to be over: "
                    "onebit_optimizer_synchronize tells after its last step");
  return ONEBIT_OK;
}

onebit_status_t onebit_optimizer_step_stream(onebit_optimizer_t optimizer, float learning_rate,
                                             cudaStream_t stream) {
  if (!optimizer)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "optimizer is NULL");
  if (optimizer->options.device == ONEBIT_DEVICE_HOST)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "optimizer is for memory of the host: its device option is "
                    "ONEBIT_DEVICE_HOST");
  OB_TRY(check_capture(optimizer, stream));
  return ob_optimizer_note(optimizer, ob_optimizer_step_on(optimizer, learning_rate, true, stream));
}

onebit_status_t onebit_optimizer_synchronize(onebit_optimizer_t optimizer) {
  if (!optimizer)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "optimizer is NULL");
  OB_TRY(ob_optimizer_catch_up(optimizer));
  return ob_optimizer_take_outcome(optimizer);
}
