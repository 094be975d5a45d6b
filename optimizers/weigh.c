/*
 * The factor of a step's gradients: accumulation, loss scale, clipping.
 *
 * All of it is one factor for a rank and step, by which the exchanges multiply gradients before
 * they are added to those of other ranks. Clipping needs the norm of all ranks' gradients first: a
 * pass over them, 4 bytes a parameter read or 2, and a message with this rank's sum of squares to
 * each other rank, or log2(ranks) of them (40 bytes of header and one word of 32 floats; every rank
 * takes the mean, so it is one trip). A rank with an error tells the others in that message, and
 * again in those of the step's exchanges: every step has the same messages, whatever its outcome,
 * so that no rank waits for one that does not come.
 */
#include <math.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "optimizers/optimizer.h"

/* --- The exchange of sums of squares */

static onebit_status_t allocate_buffers(struct onebit_optimizer *optimizer) {
  struct onebit_plan *plan = optimizer->squares;
  for (int k = 0; k < 2; k++) {
    optimizer->own_bytes += sizeof(float);
    optimizer->square[k] = ob_plan_memory(plan)->allocate(1, sizeof(float));
    if (!optimizer->square[k])
      return ob_error(ONEBIT_ERROR_MEMORY, "no memory for the norm of the gradients");
  }
  return ONEBIT_OK;
}

onebit_status_t ob_weigh_create(struct onebit_optimizer *optimizer) {
  if (optimizer->options.clip_norm == 0)
    return ONEBIT_OK;
  OB_TRY(ob_plan_create_numbers(optimizer->comm, ONEBIT_OK, ONEBIT_ALLREDUCE,
                                optimizer->options.device, 1, &optimizer->refused,
                                &optimizer->squares));
  return ob_agree(optimizer->comm, allocate_buffers(optimizer), NULL, 0);
}

void ob_weigh_destroy(struct onebit_optimizer *optimizer) {
  for (int k = 0; optimizer->squares && k < 2; k++)
    ob_plan_memory(optimizer->squares)->release(optimizer->square[k]);
  onebit_plan_destroy(optimizer->squares);
  optimizer->squares = NULL;
}

/* The mean over the ranks of `own`. A rank without one has a status that says why. */
static onebit_status_t weigh_exchange(struct onebit_optimizer *optimizer, onebit_status_t status,
                                      float own, float *mean) {
  struct onebit_plan *plan = optimizer->squares;
  const struct ob_memory *memory = ob_plan_memory(plan);
  struct ob_call call = ob_plan_call(plan, optimizer->square[0], optimizer->square[1]);
  ob_constants_agree(optimizer, optimizer->step.learning_rate, "learning_rate", &call);
  if (status == ONEBIT_OK)
    status = memory->copy(optimizer->square[0], &own, sizeof own);
  OB_TRY(ob_plan_start(plan, status, &call));
  optimizer->sent[OB_EXCHANGE_DENSE] += ob_plan_wire_bytes(plan);
  OB_TRY(ob_plan_test(plan, true));
  return memory->copy(mean, optimizer->square[1], sizeof *mean);
}

/* --- The norm */

/* Added up by tensor, so that no bit of it depends on what is exchanged together. */
static onebit_status_t square_sum(struct onebit_optimizer *optimizer, double *sum) {
  *sum = 0;
  for (size_t u = 0; u < optimizer->bucket_count; u++)
    OB_TRY(
        ob_bucket_pass(optimizer, &optimizer->buckets[u], OB_PASS_SQUARES, optimizer->steps + 1));
  for (size_t t = 0; t < optimizer->tensor_count; t++) {
    const struct ob_tensor *tensor = &optimizer->tensors[t];
    double part;
    OB_TRY(optimizer->executor->sum(optimizer, &optimizer->buckets[tensor->bucket], 0,
                                    tensor->first_block, tensor->end_block, &part));
    *sum += part;
  }
  return ONEBIT_OK;
}

/* Returns the mean square. In a step that sends nothing, it is this rank's alone; and the method
 * handles a gradient that is not finite, since the step counts for the others. */
static onebit_status_t mean_square(struct onebit_optimizer *optimizer, onebit_status_t status,
                                   double *mean) {
  double sum = 0;
  float of_all;
  if (status == ONEBIT_OK)
    status = square_sum(optimizer, &sum);
  if (!ob_optimizer_sends_nothing(optimizer)) {
    OB_TRY(weigh_exchange(optimizer, status, (float)sum, &of_all));
    *mean = (double)of_all;
    return ONEBIT_OK;
  }
  *mean = isfinite(sum) ? sum : INFINITY;
  return status;
}

onebit_status_t ob_optimizer_weigh(struct onebit_optimizer *optimizer, onebit_status_t status) {
  double factor = optimizer->options.gradient_factor / optimizer->loss_scale, mean;
  optimizer->step.gradient_factor = (float)factor;
  if (optimizer->options.clip_norm == 0)
    return ONEBIT_OK;
  OB_TRY(mean_square(optimizer, status, &mean));
  double norm = sqrt(mean);
  optimizer->gradient_norm = norm;
  if (norm > optimizer->options.clip_norm)
    optimizer->step.gradient_factor = (float)(factor * (optimizer->options.clip_norm / norm));
  return ONEBIT_OK;
}

/* --- The loss scale */

onebit_status_t onebit_optimizer_get_loss_scale(onebit_optimizer_t optimizer, double *scale) {
  OB_CALL_SCOPE_OF(optimizer, OB_HANDLE_OPTIMIZER);
  if (!scale)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "scale is NULL");
  OB_TRY(ob_optimizer_catch_up(optimizer));
  *scale = optimizer->loss_scale;
  return ONEBIT_OK;
}
