/*
 * Tensors of a communicator. The table of them is the same on all ranks, but for the buffers: what
 * is made, found or given up follows from signatures, from the order of calls, and from what ranks
 * have agreed on by message. Each rank notes beside it which buffers it last gave for each tensor.
 */
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "dropin/mpi/attached.h"
#include "dropin/mpi/queue.h"

struct tensor {
  uint64_t signature;
  const void *sendbuf, *recvbuf; /* of this rank; NULL: not known */
  uint64_t used;                 /* when last: a count of calls */
  bool again;                    /* used more than once */
  unsigned steady[2];            /* calls for which this rank's buffers have been the same */
  struct ob_mpi_call call;
  struct ob_exchange *exchange;
};

struct ob_attached {
  MPI_Comm comm;
  struct ob_queue *queue;
  struct ob_follower *follower;    /* of ONEBIT_Allreduce and the like */
  struct ob_loops *loops;          /* of a preloaded program */
  struct ob_candidate *candidates; /* by position */
  onebit_status_t failure;         /* of the tensor that could not be made last */
  uint64_t calls;
  int slots; /* tensors are among the first so many */
  struct tensor *tensors[OB_MAX_TENSORS];
};

/* Tensors that were used only once may be of buffers that never return: no more than this are kept
 * for them, in number and in elements, and calls on further ones are made dense until some are
 * used again or ranks follow a period. */
#define MAX_ONCE          128
#define MAX_ONCE_ELEMENTS ((size_t)1 << 28)

/* What was not used for so many calls is not used any more. */
#define OLD_CALLS (4 * (uint64_t)OB_SEQUENCE_MAX_PERIOD)

/* ---- Beginning and end ---- */

/* What the follower asks for. */
static bool largest_of_ranks(void *context, int64_t *values, int count) {
  const struct ob_attached *attached = context;
  return ob_largest(attached->comm, values, count) == MPI_SUCCESS;
}

static int find_from(void *context, int slot, uint64_t signature, const void *sendbuf,
                     const void *recvbuf);

/* A tensor that was withdrawn so often in a row is not what ranks take it for. */
#define MAX_WITHDRAWALS 3

static bool is_lost(void *context, int slot) {
  const struct ob_attached *attached = context;
  return ob_exchange_withdrawals(attached->tensors[slot]->exchange) >= MAX_WITHDRAWALS;
}

/* What a rank alone can fail in comes first: then all learn of it. */
static bool allocate(struct ob_attached **attached, unsigned repeats) {
  *attached = ob_allocate(1, sizeof **attached);
  const struct ob_follower_ranks ranks = {*attached, largest_of_ranks, find_from, is_lost};
  if (!*attached)
    return false;
  (*attached)->candidates = ob_allocate(OB_MAX_POSITIONS, sizeof(struct ob_candidate));
  return (*attached)->candidates &&
         ob_follower_create(repeats, &ranks, &(*attached)->follower) == ONEBIT_OK &&
         ob_loops_create(repeats, largest_of_ranks, *attached, &(*attached)->loops) == ONEBIT_OK;
}

onebit_status_t ob_attached_create(MPI_Comm comm, unsigned repeats, struct ob_attached **result) {
  struct ob_attached *attached = NULL;
  int64_t missing = !allocate(&attached, repeats);
  onebit_status_t status = ONEBIT_OK;
  if (ob_largest(comm, &missing, 1) != MPI_SUCCESS)
    status = ONEBIT_ERROR_TRANSPORT;
  else if (missing)
    status = ob_error(ONEBIT_ERROR_MEMORY, "no memory for a communicator, on some rank");
  else
    status = ob_queue_create(comm, &attached->queue);
  *result = status == ONEBIT_OK ? attached : NULL;
  if (status == ONEBIT_OK)
    attached->comm = comm;
  else
    ob_attached_destroy(attached);
  return status;
}

void ob_attached_destroy(struct ob_attached *attached) {
  if (!attached)
    return;
  ob_queue_drain(attached->queue);
  for (int slot = 0; slot < attached->slots; slot++)
    if (attached->tensors[slot]) {
      ob_exchange_destroy(attached->tensors[slot]->exchange);
      ob_release(attached->tensors[slot]);
    }
  ob_queue_destroy(attached->queue);
  ob_follower_destroy(attached->follower);
  ob_loops_destroy(attached->loops);
  for (int position = 0; attached->candidates && position < OB_MAX_POSITIONS; position++)
    ob_candidate_reset(&attached->candidates[position]);
  ob_release(attached->candidates);
  ob_release(attached);
}

/* ---- Tensors ---- */

static bool has_buffers(const struct tensor *tensor, const void *sendbuf, const void *recvbuf) {
  return tensor->sendbuf == sendbuf && tensor->recvbuf == recvbuf;
}

/* The first tensor of the signature, from a slot on, that this rank knows by these buffers. */
static int find_from(void *context, int slot, uint64_t signature, const void *sendbuf,
                     const void *recvbuf) {
  const struct ob_attached *attached = context;
  for (; slot < attached->slots; slot++) {
    const struct tensor *tensor = attached->tensors[slot];
    if (tensor && tensor->signature == signature && has_buffers(tensor, sendbuf, recvbuf))
      return slot;
  }
  return OB_NO_TENSOR;
}

static void drop(struct ob_attached *attached, int slot) {
  struct tensor *tensor = attached->tensors[slot];
  if (!tensor)
    return;
  ob_exchange_destroy(tensor->exchange);
  ob_release(tensor);
  attached->tensors[slot] = NULL;
  ob_follower_drop(attached->follower, slot);
  for (int position = 0; position < OB_MAX_POSITIONS; position++)
    if (attached->candidates[position].tensor == slot + 1)
      attached->candidates[position].tensor = 0;
}

/* A free slot, or that of the tensor not used for longest; what is old goes anyway. */
static int make_slot(struct ob_attached *attached) {
  int oldest = OB_NO_TENSOR, empty = OB_NO_TENSOR;
  for (int slot = 0; slot < attached->slots; slot++) {
    const struct tensor *tensor = attached->tensors[slot];
    if (tensor && attached->calls - tensor->used > OLD_CALLS) {
      drop(attached, slot);
      tensor = NULL;
    }
    if (!tensor && empty == OB_NO_TENSOR)
      empty = slot;
    if (tensor && (oldest == OB_NO_TENSOR || tensor->used < attached->tensors[oldest]->used))
      oldest = slot;
  }
  if (empty != OB_NO_TENSOR)
    return empty;
  if (attached->slots < OB_MAX_TENSORS)
    return attached->slots++;
  drop(attached, oldest);
  return oldest;
}

/* What ONEBIT_BITS says. */
static const struct ob_bits own_bits = {0, 0};

/* Collective. Gives the slot, or OB_FAILED_TENSOR on all ranks. */
static int make_tensor(struct ob_attached *attached, const struct ob_mpi_call *call,
                       struct ob_bits bits, uint64_t signature) {
  int slot = make_slot(attached);
  struct ob_exchange *exchange = NULL;
  struct tensor *tensor = ob_allocate(1, sizeof *tensor);
  onebit_status_t status =
      ob_exchange_create(attached->queue, call, bits, tensor != NULL, &exchange);
  if (status != ONEBIT_OK) {
    attached->failure = status;
    ob_release(tensor);
    return OB_FAILED_TENSOR;
  }
  tensor->exchange = exchange;
  tensor->signature = signature;
  tensor->call = *call;
  tensor->sendbuf = call->sendbuf;
  tensor->recvbuf = call->recvbuf;
  attached->tensors[slot] = tensor;
  return slot;
}

/* This call is of this tensor. Gives true where this rank has other buffers than it had, and so
 * must withdraw. Where they were another tensor's, what is kept of this one's error may be of
 * neither, and is given up. */
static bool other_buffers(struct ob_attached *attached, struct tensor *tensor,
                          const struct ob_mpi_call *call, bool by_buffers) {
  if (has_buffers(tensor, call->sendbuf, call->recvbuf))
    return false;
  int other = find_from(attached, 0, tensor->signature, call->sendbuf, call->recvbuf);
  if (by_buffers && other != OB_NO_TENSOR) {
    onebit_plan_reset_residual(ob_exchange_plan(tensor->exchange));
    attached->tensors[other]->sendbuf = attached->tensors[other]->recvbuf = NULL;
  }
  tensor->sendbuf = call->sendbuf;
  tensor->recvbuf = call->recvbuf;
  return true;
}

static struct ob_exchange *use(struct ob_attached *attached, int slot,
                               const struct ob_mpi_call *call, bool by_buffers, bool *withdraw) {
  struct tensor *tensor = attached->tensors[slot];
  *withdraw = other_buffers(attached, tensor, call, by_buffers);
  tensor->again = tensor->used != 0;
  tensor->used = attached->calls;
  return tensor->exchange;
}

/* ---- Periods ---- */

/* Of a followed phase: its tensor, made when it comes for the first time. */
static struct ob_exchange *use_phase(struct ob_attached *attached, size_t phase,
                                     const struct ob_mpi_call *call, uint64_t signature,
                                     bool by_buffers, bool *withdraw) {
  int slot = ob_follower_tensor(attached->follower, phase);
  if (slot == OB_NO_TENSOR) {
    slot = make_tensor(attached, call, own_bits, signature);
    ob_follower_set(attached->follower, phase, slot);
  }
  return slot == OB_FAILED_TENSOR ? NULL : use(attached, slot, call, by_buffers, withdraw);
}

/* What a call is to the follower, which notes it. */
static ptrdiff_t phase_of(struct ob_attached *attached, const struct ob_mpi_call *call,
                          onebit_dtype_t dtype, bool sum, uint64_t *signature, bool *look) {
  bool same; /* tensors have their buffers, too */
  *signature = ob_follower_signature(call->operation, dtype, sum, call->count);
  attached->calls++;
  return ob_follower_phase(attached->follower, *signature, call->sendbuf, call->recvbuf, look,
                           &same);
}

/* ---- Positions ---- */

/* A side that has been the same for so many calls should stay so: where it does not, the call may
 * be of another tensor. */
#define STEADY_CALLS 8

static bool is_strange(struct tensor *tensor, const struct ob_mpi_call *call) {
  const bool same[2] = {tensor->sendbuf == call->sendbuf, tensor->recvbuf == call->recvbuf};
  bool strange = false;
  for (int side = 0; side < 2; side++) {
    strange = strange || (!same[side] && tensor->steady[side] >= STEADY_CALLS);
    tensor->steady[side] = same[side] ? tensor->steady[side] + 1 : 0;
  }
  tensor->sendbuf = call->sendbuf;
  tensor->recvbuf = call->recvbuf;
  return strange;
}

static struct ob_exchange *use_position(struct ob_attached *attached,
                                        struct ob_candidate *candidate,
                                        const struct ob_mpi_call *call, uint64_t signature,
                                        struct ob_followed *followed) {
  if (!candidate->tensor) {
    int slot = make_tensor(attached, call, followed->bits, signature);
    if (slot == OB_FAILED_TENSOR)
      return NULL;
    candidate->tensor = slot + 1;
  }
  struct tensor *tensor = attached->tensors[candidate->tensor - 1];
  followed->withdraw = is_strange(tensor, call);
  tensor->again = tensor->used != 0;
  tensor->used = attached->calls;
  if (candidate->is_restarted)
    onebit_plan_reset_residual(ob_exchange_plan(tensor->exchange));
  candidate->is_restarted = false;
  return tensor->exchange;
}

/* Whether the tensor of a position is to be compressed now. */
static enum ob_reason judge(struct ob_attached *attached, int position,
                            const struct ob_mpi_call *call, onebit_dtype_t dtype,
                            struct ob_followed *followed) {
  struct ob_candidate *candidate = &attached->candidates[position];
  int next = ob_loops_next(attached->loops, position);
  if (candidate->tensor && is_lost(attached, candidate->tensor - 1) &&
      candidate->state != OB_CANDIDATE_DENSE)
    ob_candidate_lose(candidate);
  if (followed->named && candidate->state != OB_CANDIDATE_DENSE)
    return OB_REASON_NONE;
  return ob_candidate_judge(candidate, next >= 0 ? &attached->candidates[next] : NULL, call, dtype,
                            ob_loops_hash(attached->loops, position), followed->record);
}

/* Where a loop is left, its tensors may have the errors of others. */
static void restart_left(struct ob_attached *attached) {
  int first, count;
  ob_loops_left(attached->loops, &first, &count);
  for (int position = first; position < first + count; position++)
    attached->candidates[position].is_restarted = true;
}

static void look(struct ob_attached *attached) {
  if (!ob_loops_look(attached->loops))
    return;
  for (int position = 0; position < OB_MAX_POSITIONS; position++)
    ob_candidate_reset(&attached->candidates[position]);
}

/* ---- A budget ---- */

/* The bits of all tensors by what they have told since, every so many calls. */
#define FIT_CALLS 64

/* All ranks alike: once the calls in flight are decided they know the same of every plan. */
static void fit(struct ob_attached *attached, double budget) {
  onebit_plan_t plans[OB_MAX_TENSORS];
  size_t count = 0;
  for (int slot = 0; slot < attached->slots; slot++) {
    const struct tensor *tensor = attached->tensors[slot];
    if (!tensor)
      continue;
    ob_exchange_withdrawals(tensor->exchange);
    plans[count++] = ob_exchange_plan(tensor->exchange);
  }
  onebit_plan_fit_budget(plans, count, budget);
}

static struct ob_exchange *follow(struct ob_attached *attached, const struct ob_mpi_call *call,
                                  struct ob_followed *followed) {
  onebit_dtype_t dtype;
  bool sum, is_time;
  followed->withdraw = false;
  followed->candidate = NULL;
  followed->reason = ob_mpi_call_resolve(call, &dtype, &sum);
  if (followed->reason != OB_REASON_NONE)
    return NULL;
  const bool in_place = call->sendbuf == MPI_IN_PLACE;
  uint64_t signature = ob_follower_signature(call->operation, dtype, sum, call->count);
  attached->calls++;
  if (followed->budget > 0 && attached->calls % FIT_CALLS == 0)
    fit(attached, followed->budget);
  int position =
      ob_loops_position(attached->loops, signature, in_place ? call->recvbuf : call->sendbuf,
                        call->recvbuf, &is_time);
  restart_left(attached);
  if (is_time)
    look(attached);
  if (position == OB_NO_POSITION) {
    followed->reason = ob_loops_reason(attached->loops);
    return NULL;
  }
  followed->candidate = &attached->candidates[position];
  followed->reason = judge(attached, position, call, dtype, followed);
  if (followed->reason != OB_REASON_NONE)
    return NULL;
  struct ob_exchange *exchange =
      use_position(attached, followed->candidate, call, signature, followed);
  followed->reason = exchange ? OB_REASON_NONE : OB_REASON_MEMORY;
  return exchange;
}

struct ob_exchange *ob_attached_follow(struct ob_attached *attached, const struct ob_mpi_call *call,
                                       struct ob_followed *followed) {
  struct ob_exchange *exchange = follow(attached, call, followed);
  followed->failed = attached->queue->failed;
  return exchange;
}

void ob_attached_note(struct ob_attached *attached, onebit_operation_t operation, size_t count) {
  ob_loops_note(attached->loops, (uint64_t)count << 4 | (uint64_t)operation);
}

/* ---- Agreeing on a tensor ---- */

/* Whether one more may be made for buffers that no rank knows. All ranks find alike. */
static bool may_make(const struct ob_attached *attached, const struct ob_mpi_call *call) {
  size_t once = 0, elements = call->count;
  for (int slot = 0; slot < attached->slots; slot++) {
    const struct tensor *tensor = attached->tensors[slot];
    if (tensor && !tensor->again && attached->calls - tensor->used <= OLD_CALLS) {
      once++;
      elements += tensor->call.count;
    }
  }
  return once == 0 || (once < MAX_ONCE && elements <= MAX_ONCE_ELEMENTS);
}

/* The tensor that some rank knows by its buffers: of several the last one. OB_NO_TENSOR: none does.
 * *alike: whether it is the same for all ranks. */
static int agree_on_tensor(struct ob_attached *attached, const struct ob_mpi_call *call,
                           uint64_t signature, bool *alike, int *code) {
  int64_t slot = find_from(attached, 0, signature, call->sendbuf, call->recvbuf);
  int64_t largest[] = {slot, -slot, (int64_t)signature, -(int64_t)signature};
  *code = ob_largest(attached->comm, largest, 4);
  if (*code == MPI_SUCCESS && largest[2] != -largest[3]) {
    ob_error(ONEBIT_ERROR_MISMATCH, "count, type or operation differs between ranks");
    *code = MPI_ERR_COUNT;
  }
  *alike = largest[0] == -largest[1];
  return (int)largest[0];
}

/* A call that is of no followed phase: by the ranks' agreement. */
static struct ob_exchange *find_tensor(struct ob_attached *attached, const struct ob_mpi_call *call,
                                       uint64_t signature, bool *withdraw, int *code) {
  bool alike;
  int slot = agree_on_tensor(attached, call, signature, &alike, code);
  if (*code != MPI_SUCCESS)
    return NULL;
  if (slot == OB_NO_TENSOR && may_make(attached, call))
    slot = make_tensor(attached, call, own_bits, signature);
  if (slot < 0)
    return NULL;
  struct ob_exchange *exchange = use(attached, slot, call, true, withdraw);
  if (alike)
    return exchange;
  ob_exchange_count_dense(exchange); /* some rank would withdraw: all know, and none begins */
  return NULL;
}

struct ob_exchange *ob_attached_agree(struct ob_attached *attached, const struct ob_mpi_call *call,
                                      bool *withdraw, int *code) {
  onebit_dtype_t dtype;
  uint64_t signature;
  bool sum, look;
  *withdraw = false;
  *code = MPI_SUCCESS;
  if (ob_mpi_call_resolve(call, &dtype, &sum) != OB_REASON_NONE)
    return NULL;
  attached->failure = ONEBIT_OK;
  ptrdiff_t phase = phase_of(attached, call, dtype, sum, &signature, &look);
  struct ob_exchange *exchange =
      phase >= 0 ? use_phase(attached, (size_t)phase, call, signature, true, withdraw)
                 : find_tensor(attached, call, signature, withdraw, code);
  if (look && *code == MPI_SUCCESS)
    ob_follower_look(attached->follower);
  if (attached->failure != ONEBIT_OK && attached->failure != ONEBIT_ERROR_MEMORY)
    *code = MPI_ERR_OTHER;
  return exchange;
}

onebit_status_t ob_attached_forget(struct ob_attached *attached, const void *buffer) {
  onebit_status_t worst = ONEBIT_OK;
  for (int slot = 0; slot < attached->slots; slot++) {
    const struct tensor *tensor = attached->tensors[slot];
    if (!tensor || (tensor->sendbuf != buffer && tensor->recvbuf != buffer))
      continue;
    onebit_status_t status = onebit_plan_reset_residual(ob_exchange_plan(tensor->exchange));
    worst = status == ONEBIT_OK ? worst : status;
  }
  return worst;
}

void ob_attached_visit(const struct ob_attached *attached, ob_attached_visitor *visit,
                       void *context) {
  for (int slot = 0; slot < attached->slots; slot++)
    if (attached->tensors[slot])
      visit(attached->tensors[slot]->exchange, &attached->tensors[slot]->call, context);
}
