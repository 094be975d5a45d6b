/*
 * The library's state of an MPI communicator, an attribute of it: made by the first call that wants
 * it, gone when the communicator is freed or MPI ends (MPI_Finalize frees MPI_COMM_SELF, whose
 * attributes are deleted first).
 *
 * A tensor is a position in the order of the calls (dropin/loops.h). Where a program asks for
 * compression from the first call on, a message of 32 bytes identifies the tensors of calls without
 * a position; never what one rank alone sees of its buffers.
 */
#ifndef OB_DROPIN_MPI_COMMUNICATOR_H
#define OB_DROPIN_MPI_COMMUNICATOR_H

#include "dropin/counters.h"
#include "dropin/loops.h"
#include "dropin/mpi/exchange.h"

struct ob_attached;
struct ob_shadow;

/* Finds or makes the state. Collective the first time, where `repeats` counts (ob_loops_create).
 * NULL where the ranks found that they can not make it, and for inter-communicators and single
 * ranks: on all ranks alike. */
struct ob_attached *ob_attached_of(MPI_Comm comm, unsigned repeats);

/* A call as the preload library follows it. */
struct ob_followed {
  struct ob_bits bits;      /* in: an element, where it is compressed */
  double budget;            /* in: of the bytes of all tensors; 0: no budget */
  enum ob_reason reason;    /* out: why it is dense */
  int tensor;               /* out: its number, where it is compressed */
  struct ob_shadow *shadow; /* out: of that tensor */
  bool failed;              /* out: a rank has not arrived; onebit_last_error names it */
};

/* Finds the exchange for a preloaded program's call, or NULL for a dense call, and the reason.
 * Calls are learned; once all ranks follow, a call of a known position is compressed. Collective at
 * times, all ranks alike: also in a call that does not block, when the ranks agree whether to
 * follow and when a plan is made. Calls that are not to be compressed, which all ranks must judge
 * alike, are not to be given. */
struct ob_exchange *ob_attached_follow(struct ob_attached *attached, const struct ob_mpi_call *call,
                                       struct ob_followed *followed);

/* Notes a call that is not to be compressed, but takes part in the order of those that are.
 * Local. */
void ob_attached_note(struct ob_attached *attached, onebit_operation_t operation, size_t count);

/* Finds the exchange for ONEBIT_Allreduce and the like: compressed from the first call on. Before
 * the ranks follow, they agree by a message of 32 bytes on which tensor a call is of. NULL for a
 * dense call, or with an MPI error code in *code: agreeing has failed, MPI_ERR_COUNT (ranks
 * differ), or MPI_ERR_OTHER (a plan could not be made, not for want of memory). */
struct ob_exchange *ob_attached_agree(struct ob_attached *attached, const struct ob_mpi_call *call,
                                      bool *withdraw, int *code);

/* Sets this rank's residuals of tensors in this buffer to zero. Local. Errors: ONEBIT_ERROR_BUSY
 * (one is in flight: its residual is kept). */
onebit_status_t ob_attached_forget(struct ob_attached *attached, const void *buffer);

/* Walks the tensors that have an exchange now, in the order of their making. */
typedef void ob_attached_visitor(const struct ob_exchange *exchange, const struct ob_mpi_call *call,
                                 void *context);
void ob_attached_visit(const struct ob_attached *attached, ob_attached_visitor *visit,
                       void *context);

/* ---- Inside the folder: attributes.c attaches what communicator.c creates ---- */

/* Creates the state of a communicator. Collective: all ranks fail, or none. */
onebit_status_t ob_attached_create(MPI_Comm comm, unsigned repeats, struct ob_attached **attached);

/* Destroys it after the calls in flight. Collective. */
void ob_attached_destroy(struct ob_attached *attached);

/* Returns the communicator's state, or NULL where there is none yet or can be none. Local. */
struct ob_attached *ob_attached_known(MPI_Comm comm);

/* Returns the status with which creating it failed, so that there can be none; ONEBIT_OK if it was
 * not tried. Local. */
onebit_status_t ob_attached_read_failure(MPI_Comm comm);

/* Registers a call by MPI_Finalize that frees everything. Local. */
void ob_attached_watch_finalize(void);

/* Makes requests on a communicator that is being freed report their errors elsewhere (calls.c). */
void ob_requests_orphan(MPI_Comm comm);

/*
 * ---- Shadows (shadow.c) ----
 *
 * Now and then a part of a compressed sum is also computed exactly, and both are compared. With
 * error feedback a sum differs from the exact one by the rounding error of the call before. Where
 * that is much of the sum itself, since the call before was much larger, the sum is no gradient
 * that is averaged over steps, and the tensor is exact from then on, on all ranks.
 */

/* The shadow of a tensor. All zero at first; the same on all ranks but for the input. */
struct ob_shadow {
  uint64_t calls;           /* compressed blocking ones */
  unsigned offences, since; /* shadows beyond the bound; calls since the latest of them */
  bool refused;             /* it is exact from now on */
  size_t first;             /* the element from which on a part is compared, if there is a shadow */
  double *input;            /* of that part; ob_shadow_bytes */
  double norm;              /* square, of a part of the latest nonblocking call's input */
};

/* Bytes for the input of a tensor's shadow. */
size_t ob_shadow_bytes(const struct ob_mpi_call *call);

/* Called before a compressed blocking call. True if it has a shadow, which all ranks find alike;
 * its input is then kept. */
bool ob_shadow_begin(struct ob_shadow *shadow, const struct ob_mpi_call *call);

/* Called after that call. Collective. tensor: its number for messages; bits: of an element in the
 * call, 0 where the tensor may have more, and so is not judged. */
void ob_shadow_end(struct ob_shadow *shadow, const struct ob_mpi_call *call, int tensor, int bits,
                   struct ob_record *record);

/* Called before a nonblocking call, which has no shadow. True if this rank's input is so much
 * smaller than the one before that the error of that one would be much of the sum. Then the rank
 * withdraws. */
bool ob_shadow_is_quiet(struct ob_shadow *shadow, const struct ob_mpi_call *call);

#endif
