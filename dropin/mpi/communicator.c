/*
 * The tensors of a communicator are in a table, which is the same on all ranks, except for the
 * buffers. Signatures, the order of calls and agreements by message decide which tensors are
 * created, found and dropped. Each rank also notes the buffers that it last gave for each tensor.
 */

#include "dropin/mpi/communicator.h"
#include "base/error.h"
#include "base/memory.h"
#include "dropin/mpi/exchange.h"

#define MAX_TENSORS   OB_MAX_POSITIONS
#define NO_TENSOR     (-1)
#define FAILED_TENSOR (-2) /* some rank had no memory for the tensor: its calls stay dense */

struct tensor {
  uint64_t signature;
  struct ob_buffers buffers; /* the buffers of this rank; NULL: not known */
  uint64_t used;             /* the value of `calls` when the tensor was last used */
  bool again;                /* used more than once */
  unsigned pause;            /* for how many more calls the tensor stays dense, after withdrawals */
  struct ob_mpi_call call;
  struct ob_exchange *exchange;
  struct ob_shadow shadow; /* its input is stored after this struct */
};

struct ob_attached {
  MPI_Comm comm;
  struct ob_queue *queue;
  struct ob_loops *loops;
  onebit_status_t failure; /* why the latest tensor could not be created */
  uint64_t calls;
  int slots; /* all tensors are among the first `slots` entries */
  struct tensor *tensors[MAX_TENSORS];
};

/* Limits for tensors that were used only once, whose buffers may never be used again: their number,
 * and the sum of their elements. Calls with new buffers are dense until some of these tensors are
 * used again, or until the ranks follow a loop. */
#define MAX_ONCE          128
#define MAX_ONCE_ELEMENTS ((size_t)1 << 28)

/* A tensor that has not been used for OLD_CALLS calls is dropped. */
#define OLD_CALLS (4 * (uint64_t)OB_MAX_POSITIONS)

/* ---- Beginning and end ---- */

static bool communicator_allreduce_max(void *context, int64_t *values, int count) {
  const struct ob_attached *attached = context;
  return ob_allreduce_max(attached->comm, values, count) == MPI_SUCCESS;
}

/* Allocates the memory that this rank needs. If this fails, the caller tells all ranks. */
static bool mpi_communicator_allocate(struct ob_attached **attached, unsigned repeats) {
  *attached = ob_allocate(1, sizeof **attached);
  return *attached && ob_loops_create(repeats, communicator_allreduce_max, *attached,
                                      &(*attached)->loops) == ONEBIT_OK;
}

onebit_status_t ob_attached_create(MPI_Comm comm, unsigned repeats, struct ob_attached **result) {
  struct ob_attached *attached = NULL;
  int64_t missing = !mpi_communicator_allocate(&attached, repeats);
  onebit_status_t status = ONEBIT_OK;
  if (ob_allreduce_max(comm, &missing, 1) != MPI_SUCCESS)
    status = ONEBIT_ERROR_TRANSPORT;
  else if (missing)
    status = ob_error(ONEBIT_ERROR_MEMORY, "some rank is out of memory for a communicator");
  else
    status = ob_queue_create(comm, &attached->queue);
  *result = status == ONEBIT_OK ? attached : NULL;
  if (status == ONEBIT_OK)
    attached->comm = comm;
  else
    ob_attached_destroy(attached);
  return status;
}

static void mpi_communicator_release(struct tensor *tensor) {
  ob_exchange_destroy(tensor->exchange);
  ob_release(tensor);
}

void ob_attached_destroy(struct ob_attached *attached) {
  if (!attached)
    return;
  ob_queue_drain(attached->queue);
  for (int slot = 0; slot < attached->slots; slot++)
    if (attached->tensors[slot])
      mpi_communicator_release(attached->tensors[slot]);
  ob_queue_destroy(attached->queue);
  ob_loops_destroy(attached->loops);
  ob_release(attached);
}

/* ---- Tensors ---- */

static bool mpi_communicator_has_buffers(const struct tensor *tensor,
                                         const struct ob_mpi_call *call) {
  return tensor->buffers.sendbuf == call->sendbuf && tensor->buffers.recvbuf == call->recvbuf;
}

/* Finds the first tensor of the signature that has these buffers on this rank. */
static int mpi_communicator_find(const struct ob_attached *attached, uint64_t signature,
                                 const struct ob_mpi_call *call) {
  for (int slot = 0; slot < attached->slots; slot++) {
    const struct tensor *tensor = attached->tensors[slot];
    if (tensor && tensor->signature == signature && mpi_communicator_has_buffers(tensor, call))
      return slot;
  }
  return NO_TENSOR;
}

static void drop_tensor(struct ob_attached *attached, int slot) {
  mpi_communicator_release(attached->tensors[slot]);
  attached->tensors[slot] = NULL;
  ob_loops_remove_tensor(attached->loops, slot + 1);
}

/* Returns a free slot. Tensors that are too old are dropped first. If no slot is free, drops the
 * tensor that was used least recently. */
static int reserve_slot(struct ob_attached *attached) {
  int oldest = NO_TENSOR, empty = NO_TENSOR;
  for (int slot = 0; slot < attached->slots; slot++) {
    const struct tensor *tensor = attached->tensors[slot];
    if (tensor && attached->calls - tensor->used > OLD_CALLS) {
      drop_tensor(attached, slot);
      tensor = NULL;
    }
    if (!tensor && empty == NO_TENSOR)
      empty = slot;
    if (tensor && (oldest == NO_TENSOR || tensor->used < attached->tensors[oldest]->used))
      oldest = slot;
  }
  if (empty != NO_TENSOR)
    return empty;
  if (attached->slots < MAX_TENSORS)
    return attached->slots++;
  drop_tensor(attached, oldest);
  return oldest;
}

/* Zeros, which select the bits per element that ONEBIT_BITS sets. */
static const struct ob_bits own_bits = {0, 0};

/* Creates a tensor. Collective. Returns the slot, or FAILED_TENSOR on all ranks. */
static int create_tensor(struct ob_attached *attached, const struct ob_mpi_call *call,
                         struct ob_bits bits, uint64_t signature) {
  int slot = reserve_slot(attached);
  struct ob_exchange *exchange = NULL;
  struct tensor *tensor = ob_allocate(1, sizeof *tensor + ob_shadow_bytes(call));
  onebit_status_t status =
      ob_exchange_create(attached->queue, call, bits, tensor != NULL, &exchange);
  if (status != ONEBIT_OK) {
    attached->failure = status;
    ob_release(tensor);
    return FAILED_TENSOR;
  }
  tensor->exchange = exchange;
  tensor->shadow.input = (double *)(tensor + 1);
  tensor->signature = signature;
  tensor->call = *call;
  tensor->buffers = (struct ob_buffers){call->sendbuf, call->recvbuf, {0, 0}};
  attached->tensors[slot] = tensor;
  return slot;
}

static struct ob_exchange *use_tensor(struct ob_attached *attached, int slot,
                                      const struct ob_mpi_call *call) {
  struct tensor *tensor = attached->tensors[slot];
  if (ob_buffers_note(&tensor->buffers, call->sendbuf, call->recvbuf))
    onebit_plan_reset_residual(tensor->exchange->plan);
  tensor->again = tensor->used != 0;
  tensor->used = attached->calls;
  return tensor->exchange;
}

/* ---- Positions ---- */

/* Resets the residuals of a loop that the program has left: they may belong to other tensors. */
static void reset_residuals_of_left_loop(struct ob_attached *attached) {
  int first, count;
  ob_loops_read_left_positions(attached->loops, &first, &count);
  for (int position = first; position < first + count; position++) {
    int slot = *ob_loops_tensor(attached->loops, position) - 1;
    if (slot >= 0)
      onebit_plan_reset_residual(attached->tensors[slot]->exchange->plan);
  }
}

/* Notes the call, and returns its position. */
static int mpi_communicator_note_call(struct ob_attached *attached, const struct ob_mpi_call *call,
                                      uint64_t signature, bool *look) {
  const bool in_place = call->sendbuf == MPI_IN_PLACE;
  attached->calls++;
  int position = ob_loops_position(attached->loops, signature,
                                   in_place ? call->recvbuf : call->sendbuf, call->recvbuf, look);
  reset_residuals_of_left_loop(attached);
  return position;
}

/* Looks for a loop. If there was no space for one more, the tensors of all known loops are
 * freed. */
static void look_for_loop(struct ob_attached *attached) {
  if (!ob_loops_find_loop(attached->loops))
    return;
  for (int slot = 0; slot < attached->slots; slot++)
    if (attached->tensors[slot])
      drop_tensor(attached, slot);
}

/* Returns the tensor of a position, and creates it when it is first needed; NULL if it can not be
 * created. */
static struct tensor *get_tensor_at(struct ob_attached *attached, int position,
                                    const struct ob_mpi_call *call, struct ob_bits bits,
                                    uint64_t signature) {
  int *number = ob_loops_tensor(attached->loops, position);
  if (!*number) {
    int slot = create_tensor(attached, call, bits, signature);
    if (slot == FAILED_TENSOR)
      return NULL;
    *number = slot + 1;
  }
  return attached->tensors[*number - 1];
}

/* ---- A preloaded program's calls ---- */

/* The budget of ONEBIT_BUDGET is divided among the tensors again after this many calls, according
 * to the plans' measurements in these calls. */
#define FIT_CALLS 64

/* Divides the budget among the tensors. Waits until the calls in flight are decided, since all
 * ranks then have the same measurements of every plan, and so divide in the same way. */
static void fit_budget(struct ob_attached *attached, double budget) {
  onebit_plan_t plans[MAX_TENSORS];
  size_t count = 0;
  for (int slot = 0; slot < attached->slots; slot++) {
    const struct tensor *tensor = attached->tensors[slot];
    if (!tensor)
      continue;
    ob_exchange_count_withdrawals(tensor->exchange);
    plans[count++] = tensor->exchange->plan;
  }
  onebit_plan_fit_budget(plans, count, budget);
}

/* After MAX_WITHDRAWALS withdrawals in a row a tensor stays dense for PAUSE_CALLS calls: a
 * withdrawn call takes the time of a compressed call and of a dense one. */
#define MAX_WITHDRAWALS 3
#define PAUSE_CALLS     64

static enum ob_reason judge_tensor(struct tensor *tensor) {
  if (tensor->shadow.refused)
    return OB_REASON_UNFAITHFUL;
  if (!tensor->pause && ob_exchange_count_withdrawals(tensor->exchange) >= MAX_WITHDRAWALS) {
    ob_exchange_reset_withdrawals(tensor->exchange);
    tensor->pause = PAUSE_CALLS;
  }
  if (!tensor->pause)
    return OB_REASON_NONE;
  tensor->pause--;
  return OB_REASON_WITHDRAWN;
}

static struct ob_exchange *mpi_communicator_follow(struct ob_attached *attached,
                                                   const struct ob_mpi_call *call,
                                                   struct ob_followed *followed) {
  onebit_dtype_t dtype;
  bool sum, is_time;
  followed->reason = ob_mpi_call_resolve(call, &dtype, &sum);
  if (followed->reason != OB_REASON_NONE)
    return NULL;
  uint64_t signature = ob_loops_signature(call->operation, dtype, sum, call->count);
  int position = mpi_communicator_note_call(attached, call, signature, &is_time);
  if (followed->budget > 0 && attached->calls % FIT_CALLS == 0)
    fit_budget(attached, followed->budget);
  if (is_time)
    look_for_loop(attached);
  followed->reason = ob_loops_reason(attached->loops);
  if (position == OB_NO_POSITION)
    return NULL;
  struct tensor *tensor = get_tensor_at(attached, position, call, followed->bits, signature);
  followed->reason = tensor ? judge_tensor(tensor) : OB_REASON_MEMORY;
  if (followed->reason != OB_REASON_NONE)
    return NULL;
  followed->shadow = &tensor->shadow;
  followed->tensor = *ob_loops_tensor(attached->loops, position);
  return use_tensor(attached, followed->tensor - 1, call);
}

struct ob_exchange *ob_attached_follow(struct ob_attached *attached, const struct ob_mpi_call *call,
                                       struct ob_followed *followed) {
  struct ob_exchange *exchange = mpi_communicator_follow(attached, call, followed);
  followed->failed = attached->queue->failed;
  return exchange;
}

void ob_attached_note(struct ob_attached *attached, onebit_operation_t operation, size_t count) {
  ob_loops_note(attached->loops, (uint64_t)count << 4 | (uint64_t)operation);
}

/* ---- Agreeing on a tensor ---- */

/* Returns true if a tensor may be created for buffers that no rank knows. Gives the same result on
 * all ranks. */
static bool may_create_tensor(const struct ob_attached *attached, const struct ob_mpi_call *call) {
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

/* Agrees on the tensor that some rank recognises by its buffers. If ranks recognise different ones,
 * the highest slot is taken; NO_TENSOR if no rank recognises one. alike: all ranks recognise the
 * same tensor. */
static int agree_on_tensor(struct ob_attached *attached, const struct ob_mpi_call *call,
                           uint64_t signature, bool *alike, int *code) {
  int64_t slot = mpi_communicator_find(attached, signature, call);
  int64_t largest[] = {slot, -slot, (int64_t)signature, -(int64_t)signature};
  *code = ob_allreduce_max(attached->comm, largest, 4);
  if (*code == MPI_SUCCESS && largest[2] != -largest[3]) {
    ob_error(ONEBIT_ERROR_MISMATCH, "count, type or operation differs between ranks");
    *code = MPI_ERR_COUNT;
  }
  *alike = largest[0] == -largest[1];
  return (int)largest[0];
}

/* Returns true if this rank knew the tensor by other buffers. If the call's buffers belonged to
 * another tensor before, the residual is reset, since it may belong to neither tensor. */
static bool detect_new_buffers(struct ob_attached *attached, int slot,
                               const struct ob_mpi_call *call) {
  struct tensor *tensor = attached->tensors[slot];
  if (mpi_communicator_has_buffers(tensor, call))
    return false;
  int other = mpi_communicator_find(attached, tensor->signature, call);
  if (other != NO_TENSOR) {
    onebit_plan_reset_residual(tensor->exchange->plan);
    attached->tensors[other]->buffers = (struct ob_buffers){NULL, NULL, {0, 0}};
  }
  return true;
}

/* Finds the tensor of a call that has no position: the ranks agree on it. */
static struct ob_exchange *mpi_communicator_find_tensor(struct ob_attached *attached,
                                                        const struct ob_mpi_call *call,
                                                        uint64_t signature, bool *withdraw,
                                                        int *code) {
  bool alike;
  int slot = agree_on_tensor(attached, call, signature, &alike, code);
  if (*code != MPI_SUCCESS)
    return NULL;
  if (slot == NO_TENSOR && may_create_tensor(attached, call))
    slot = create_tensor(attached, call, own_bits, signature);
  if (slot < 0)
    return NULL;
  ob_loops_set_last_tensor(attached->loops, slot + 1);
  *withdraw = detect_new_buffers(attached, slot, call);
  struct ob_exchange *exchange = use_tensor(attached, slot, call);
  if (alike)
    return exchange;
  ob_exchange_count_dense(exchange); /* all ranks know that some rank would withdraw the call */
  return NULL;
}

static struct ob_exchange *use_position(struct ob_attached *attached, int position,
                                        const struct ob_mpi_call *call, uint64_t signature) {
  if (!get_tensor_at(attached, position, call, own_bits, signature))
    return NULL;
  return use_tensor(attached, *ob_loops_tensor(attached->loops, position) - 1, call);
}

struct ob_exchange *ob_attached_agree(struct ob_attached *attached, const struct ob_mpi_call *call,
                                      bool *withdraw, int *code) {
  onebit_dtype_t dtype;
  bool sum, look;
  *withdraw = false;
  *code = MPI_SUCCESS;
  if (ob_mpi_call_resolve(call, &dtype, &sum) != OB_REASON_NONE)
    return NULL;
  attached->failure = ONEBIT_OK;
  uint64_t signature = ob_loops_signature(call->operation, dtype, sum, call->count);
  int position = mpi_communicator_note_call(attached, call, signature, &look);
  struct ob_exchange *exchange =
      position == OB_NO_POSITION
          ? mpi_communicator_find_tensor(attached, call, signature, withdraw, code)
          : use_position(attached, position, call, signature);
  if (look && *code == MPI_SUCCESS)
    ob_loops_find_loop(attached->loops);
  if (attached->failure != ONEBIT_OK && attached->failure != ONEBIT_ERROR_MEMORY)
    *code = MPI_ERR_OTHER;
  return exchange;
}

onebit_status_t ob_attached_forget(struct ob_attached *attached, const void *buffer) {
  onebit_status_t worst = ONEBIT_OK;
  for (int slot = 0; slot < attached->slots; slot++) {
    const struct tensor *tensor = attached->tensors[slot];
    if (!tensor || (tensor->buffers.sendbuf != buffer && tensor->buffers.recvbuf != buffer))
      continue;
    onebit_status_t status = onebit_plan_reset_residual(tensor->exchange->plan);
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
