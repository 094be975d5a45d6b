/*
 * The library's state for an MPI communicator is an attribute of the communicator. The first call
 * that needs the state creates it. It is freed with the communicator, or in MPI_Finalize, which
 * first deletes the attributes of MPI_COMM_SELF.
 *
 * A tensor is identified by the position of its call in the order of calls (dropin/loops.h).
 * ONEBIT_Allreduce and similar functions compress from the first call on: if a call has no position
 * yet, the ranks agree on its tensor by a message of 32 bytes. The buffers of one rank alone never
 * decide which tensor it is.
 */
#ifndef OB_DROPIN_MPI_COMMUNICATOR_H
#define OB_DROPIN_MPI_COMMUNICATOR_H

#include "dropin/counters.h"
#include "dropin/loops.h"
#include "dropin/mpi/exchange.h"

struct ob_attached;
struct ob_shadow;

/* Returns the state, which the first call for a communicator creates. That call is collective, and
 * only that call uses `repeats` (ob_loops_create). Returns NULL on all ranks if some rank could not
 * create the state, and for inter-communicators and communicators of one rank. */
struct ob_attached *ob_attached_get(MPI_Comm comm, unsigned repeats);

/* The input and the output of ob_attached_follow. */
struct ob_followed {
  struct ob_bits bits;      /* in: bits per element, if the call is compressed */
  double budget;            /* in: ONEBIT_BUDGET, for all tensors together; 0: none */
  enum ob_reason reason;    /* out: why the call is dense */
  int tensor;               /* out: the tensor's number, if the call is compressed */
  struct ob_shadow *shadow; /* out: the shadow of that tensor */
  bool failed;              /* out: a rank has not arrived; onebit_last_error names that rank */
};

/* Finds the exchange for a call of a preloaded program, or returns NULL and the reason if the call
 * is dense. Once all ranks follow a loop (dropin/loops.h), calls with a known position are
 * compressed. The ranks communicate when they agree whether to follow a loop, and when they create
 * a plan: all of them do so in the same call, also in a nonblocking one. The caller must not pass
 * calls that stay dense by rules that give the same result on all ranks. */
struct ob_exchange *ob_attached_follow(struct ob_attached *attached, const struct ob_mpi_call *call,
                                       struct ob_followed *followed);

/* Notes a call that stays dense, but is part of the order of calls. Local. */
void ob_attached_note(struct ob_attached *attached, onebit_operation_t operation, size_t count);

/* Finds the exchange for a call such as ONEBIT_Allreduce, which is compressed from its first call
 * on. Before the ranks follow a loop, they agree on the tensor of a call by a message of 32 bytes.
 * *withdraw: this rank must not compress the call. Returns NULL for a dense call, and also after an
 * error, whose MPI error code is in *code: that of the failed agreement, MPI_ERR_COUNT (ranks
 * differ), or MPI_ERR_OTHER (a plan could not be created, for another reason than memory). */
struct ob_exchange *ob_attached_agree(struct ob_attached *attached, const struct ob_mpi_call *call,
                                      bool *withdraw, int *code);

/* Sets this rank's residuals of the tensors with this buffer to zero. Local. Errors:
 * ONEBIT_ERROR_BUSY (a call of such a tensor is in flight: its residual does not change). */
onebit_status_t ob_attached_forget(struct ob_attached *attached, const void *buffer);

/* Calls a function for each tensor that has an exchange now, in the order of their creation. */
typedef void ob_attached_visitor(const struct ob_exchange *exchange, const struct ob_mpi_call *call,
                                 void *context);
void ob_attached_visit(const struct ob_attached *attached, ob_attached_visitor *visit,
                       void *context);

/* ---- Inside the folder: attributes.c attaches what communicator.c creates ---- */

/* Creates the state of a communicator. Collective: all ranks fail, or none. */
onebit_status_t ob_attached_create(MPI_Comm comm, unsigned repeats, struct ob_attached **attached);

/* Destroys the state after the calls in flight. Collective. */
void ob_attached_destroy(struct ob_attached *attached);

/* Returns the communicator's state, or NULL if it has none (yet). Local. */
struct ob_attached *ob_attached_find(MPI_Comm comm);

/* Returns the status with which the creation of the state failed, or ONEBIT_OK. Local. */
onebit_status_t ob_attached_read_failure(MPI_Comm comm);

/* Makes MPI_Finalize free the states of all communicators. Local. */
void ob_attached_watch_finalize(void);

/* Makes requests on a communicator that is being freed report their errors to MPI_COMM_WORLD
 * (calls.c). */
void ob_requests_detach_comm(MPI_Comm comm);

/*
 * ---- Shadows (shadow.c) ----
 *
 * In some calls a part of the sum is computed both compressed and exactly, and the two results are
 * compared. This comparison is the shadow of the call. With error feedback a sum differs from the
 * exact one by the rounding error of the previous call. If the values of that call were much
 * larger, this error is large relative to the sum. Such a sum is not a gradient that is averaged
 * over steps, so all ranks send the tensor dense from then on.
 */

/* The shadow of a tensor, which is zero at first. All ranks have the same values, except `input`
 * and `norm`. */
struct ob_shadow {
  uint64_t calls;           /* the number of compressed blocking calls */
  unsigned offences, since; /* comparisons beyond the bound; number since the latest one */
  bool refused;             /* the tensor stays dense from now on */
  size_t first;             /* the first element of the compared part */
  double *input;            /* the input of that part, of ob_shadow_bytes bytes */
  double norm;              /* squared norm of a part of the latest nonblocking call's input */
};

/* Returns the number of bytes for the input of a tensor's shadow. */
size_t ob_shadow_bytes(const struct ob_mpi_call *call);

/* Must be called before every compressed blocking call. Returns true, on all ranks alike, if the
 * call has a shadow, and then copies the input of the shadow. */
bool ob_shadow_begin(struct ob_shadow *shadow, const struct ob_mpi_call *call);

/* Must be called after a call with a shadow. Collective. tensor: the number of the tensor, for
 * messages. bits: bits per element in the call, or 0 if the tensor may get more bits; then it is
 * never refused. */
void ob_shadow_end(struct ob_shadow *shadow, const struct ob_mpi_call *call, int tensor, int bits,
                   struct ob_record *record);

/* Must be called before a nonblocking call, which has no shadow. Returns true if this rank's input
 * is so much smaller than that of the previous call that the rounding error of that call would be
 * large relative to the sum. The rank then withdraws. */
bool ob_shadow_is_quiet(struct ob_shadow *shadow, const struct ob_mpi_call *call);

#endif
