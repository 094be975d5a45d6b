/* The state of an outer step (onebit/outer.h), which its files share; sites.h has the differences
 * of an outer step among sites. */
#ifndef OB_OPTIMIZERS_OUTER_H
#define OB_OPTIMIZERS_OUTER_H

#include <stdbool.h>

#include "collectives/plan.h"
#include "onebit/outer.h"
#include "optimizers/checkpoint/checkpoint.h"

struct ob_fragment;

/* A method of exchanging drifts, which are ranks' parameter changes: a row of functions. */
struct ob_outer_exchange {
  const char *name;
  /* Creates the exchange's state of the fragment in fragment->state. Collective. On failure all
   * ranks get an error, and `destroy` follows. */
  onebit_status_t (*create)(struct ob_fragment *fragment);
  void (*destroy)(struct ob_fragment *fragment);
  /* Begins the exchange of fragment->drift times fragment->factor, and returns at once. If `status`
   * is an error, this rank takes part to tell the others, and the exchange fails on all ranks. */
  onebit_status_t (*begin)(struct ob_fragment *fragment, onebit_status_t status);
  /* Called only if `begin` returned ONEBIT_OK. Returns the outcome, which is the same on all ranks,
   * or ONEBIT_IN_PROGRESS if the exchange has not ended and `wait` is false. After ONEBIT_OK
   * fragment->drift is the mean over the ranks, with the same bits on all ranks; after any other
   * outcome residuals are unchanged. */
  onebit_status_t (*test)(struct ob_fragment *fragment, bool wait);
  /* Ends an exchange whose messages are incomplete. Afterwards only functions of residuals and
   * `destroy` are called. */
  void (*abandon)(struct ob_fragment *fragment);
  /* Returns the bytes that this rank sends in an exchange, and its bytes of memory. */
  void (*cost)(const struct ob_fragment *fragment, uint64_t *wire, uint64_t *memory);
  /* Return and set this rank's residuals while no exchange is in flight: OB_SAVED_WORKER of the
   * values that it sends, OB_SAVED_SERVER of those that it reduces for others. `extent` returns the
   * elements of a piece that have a residual; the others copy the values of all pieces, one piece
   * after the other. Imported values are finite. */
  struct ob_run (*extent)(const struct ob_fragment *fragment, enum ob_saved what, size_t piece);
  onebit_status_t (*export_residual)(const struct ob_fragment *fragment, enum ob_saved what,
                                     float *values);
  onebit_status_t (*import_residual)(struct ob_fragment *fragment, enum ob_saved what,
                                     const float *values);
  /* Copies the worker's residual to fragment->drift; called while no exchange is in flight. NULL
   * for exchanges that do not leave a rank's residual in its parameters. */
  onebit_status_t (*keep)(struct ob_fragment *fragment);
};

extern const struct ob_outer_exchange ob_outer_plans, ob_outer_sparse;

/* The memory of consensus, momentum and drift, and the passes over them: a row for the host, one
 * for devices. A pass's input is complete when it is called, and its result when it returns. */
struct ob_outer_executor {
  const struct ob_memory *memory;
  /* Creates the device's state of the outer step, outer->device, if there are fragments. NULL on
   * the host, as are the next four. */
  onebit_status_t (*create)(struct onebit_outer *outer);
  void (*destroy)(struct onebit_outer *outer);
  int (*enter)(const struct onebit_outer *outer); /* as in struct ob_executor */
  void (*leave)(int before);
  onebit_status_t (*check)(const struct onebit_outer *outer, const char *name, const void *array);
  /* Calls ob_fragment_drift: its result goes to fragment->finite, and the checksum to
   * fragment->checksum. */
  onebit_status_t (*drift)(struct ob_fragment *fragment);
  onebit_status_t (*checksum)(const struct ob_fragment *fragment, uint32_t *checksum);
  onebit_status_t (*update)(struct ob_fragment *fragment);
  onebit_status_t (*set)(const struct ob_fragment *fragment, double mixing);
  /* Exports the worker's residual of a plan to the pieces, which are in the executor's memory.
   * Never called on the host. */
  onebit_status_t (*export_worker)(const struct onebit_plan *plan, void *const *pieces);
  /* Couples two plans if the host does not know how a call ends (struct ob_executor); `couple` is
   * memory for two pointers. Calls of both plans are on the stream of the first. `join` is called
   * when the stream has decided both: then either both are applied or neither. */
  onebit_status_t (*couple)(const struct onebit_plan *const plans[2], void *couple);
  onebit_status_t (*join)(const struct onebit_plan *first, void *couple);
  void *(*stream_of)(const struct onebit_plan *plan);
};

extern const struct ob_outer_executor ob_outer_executor_host;
#ifdef ONEBIT_HAVE_CUDA
extern const struct ob_outer_executor ob_outer_executor_cuda;
#endif

/* The elements of a tensor that are in a fragment: `count` from number `first` on, which begin at
 * index `at` of the fragment's arrays. `in_plan`: the piece's number in its plan (plans.c). */
struct ob_outer_piece {
  size_t tensor, first, count, at;
  bool uncompressed;
  size_t in_plan;
};

enum ob_fragment_stage {
  OB_FRAGMENT_IDLE,
  OB_FRAGMENT_WEIGHING, /* the weights are exchanged */
  OB_FRAGMENT_SENDING,  /* `drift` is exchanged; among sites only with a delay */
  OB_FRAGMENT_ENDED     /* `status` has the outcome; not applied yet */
};

/* The arrays of an outer step, with a float for each element. Those before OB_OUTER_HOME_ARRAYS are
 * in memory of the executor, and each is a row of the state; those before the drift are equal on
 * all ranks. */
enum ob_outer_array {
  OB_OUTER_CONSENSUS,
  OB_OUTER_MOMENTUM, /* NULL with ONEBIT_OUTER_MEAN */
  /* The drift of the exchange in flight. Between exchanges, in fragments that keep it, this rank's
   * residual: its parameters were set to consensus - drift. */
  OB_OUTER_DRIFT,
  OB_OUTER_HOME_ARRAYS,
  /* Held residuals, while the outer step is detached; on the host. */
  OB_OUTER_HELD_WORKER = OB_OUTER_HOME_ARRAYS,
  OB_OUTER_HELD_SERVER,
  OB_OUTER_ARRAYS
};

struct ob_fragment {
  struct onebit_outer *outer;
  size_t number, pieces, count;
  size_t first; /* the number of its first element among all elements */
  struct ob_outer_piece *piece;
  /* Addresses in the arrays of the outer step. */
  union {
    struct {
      float *consensus, *momentum, *drift, *held[2];
    };
    float *array[OB_OUTER_ARRAYS];
  };
  bool keeps;        /* between exchanges `drift` has this rank's residual */
  void *state;       /* the exchange's own state */
  size_t begin_step; /* from 1 to local_steps: the step of a round in which it begins */

  double weight; /* the weight of local steps since the last exchange began */
  enum ob_fragment_stage stage;
  uint64_t apply_step;     /* the local step that applies the exchange */
  double sent_weight;      /* the weight in the exchange in flight */
  float weights[2];        /* this rank's weight, and the ranks' mean weight */
  float *weights_there[2]; /* copies of `weights` in memory of the executor, for messages */
  float factor;            /* the factor of the drift that is sent */
  uint32_t checksum;       /* checksum of the consensus */
  bool finite;             /* this rank's drift is finite */
  struct ob_outcome outcome;
  double drift_squares; /* sum of squares of the latest mean drift */
  onebit_plan_t weigh;  /* the plan of weights; NULL without weights */
};

struct ob_outer_tensor {
  void *parameter, *home; /* home: its own address while `parameter` is the host's copy */
  size_t count, first;    /* number of its elements, and of elements in all tensors before it */
  bool uncompressed;
};

struct onebit_outer {
  onebit_comm_t comm;
  onebit_outer_options_t options; /* every default filled in */
  const struct ob_outer_exchange *exchange;
  const struct ob_outer_executor *executor;
  struct ob_outer_device *device; /* the executor's own state */
  bool on_host;                   /* the host has copies (ob_outer_to_host), below */
  void *array[OB_OUTER_ARRAYS];
  void *home[OB_OUTER_HOME_ARRAYS]; /* arrays in the same memory as the parameters */
  const struct ob_codec *codec;
  struct ob_outer_tensor *tensors;
  struct ob_fragment *fragments; /* options.fragments of them; among sites these are shards */
  size_t groups; /* number of fragments that the caller set: among sites each is cut into shards */
  size_t tensor_count, count, piece_count;
  size_t longest;                   /* number of elements in the longest fragment */
  struct ob_outer_piece *pieces;    /* the pieces of all fragments */
  struct ob_outer_numbers *numbers; /* scratch of a save */
  double *sums;                     /* scratch: one for each OB_OUTER_RUN elements of a fragment */
  size_t position;                  /* local steps so far in the round */
  uint64_t steps, exchanges, skipped, own_bytes;
  uint64_t fragment_bytes; /* the part of own_bytes for fragments */
  uint64_t started;        /* exchanges begun by all fragments; equal on ranks with equal steps */
  bool refused;            /* a message was refused (struct onebit_plan) */
  bool detached;           /* it has left its communicator: fragments have no exchange (move.c) */
  bool stopped; /* a move, or an exchange among sites has failed: no steps before another move */
  onebit_comm_t latest;   /* the communicator that it was to be moved to, or NULL */
  struct ob_sites *sites; /* NULL: the outer step is not among sites (sites.h) */
};

/* The rows of options; the last one, the device, may differ between ranks. */
enum { OB_OUTER_OPTIONS = 11 };
extern const struct ob_option ob_outer_options[OB_OUTER_OPTIONS];
/* Checks the options, and fills in the defaults. */
onebit_status_t ob_outer_resolve(const onebit_outer_options_t *given, onebit_outer_options_t *out);
/* Returns the arguments of a fragment's plan, without the pieces. */
onebit_status_t ob_outer_shape(const struct onebit_outer *outer, bool dense,
                               struct ob_plan_shape *shape);

/* Creates the fragments of the tensors, and their memory. Local. */
onebit_status_t ob_fragments_create(struct onebit_outer *outer);
void ob_fragments_destroy(struct onebit_outer *outer);
/* Sets the fragments' pointers after the outer step's arrays have changed. */
void ob_fragments_set_arrays(struct onebit_outer *outer);
void *ob_outer_allocate(struct onebit_outer *outer, size_t count, size_t size);
/* Returns ONEBIT_ERROR_MEMORY, with a message. */
onebit_status_t ob_outer_no_memory(const struct onebit_outer *outer);
/* Returns true if the piece is exchanged in float32. */
static inline bool ob_outer_is_dense(const struct onebit_outer *outer,
                                     const struct ob_outer_piece *piece) {
  return outer->options.bits == ONEBIT_OUTER_DENSE || piece->uncompressed;
}
/* Returns the step of a round, from 1 to local_steps, in which the exchange of that group
 * begins. */
static inline size_t ob_outer_begin_step(const struct onebit_outer *outer, size_t group) {
  return outer->options.local_steps * (group + 1) / outer->groups;
}
/* Cuts the outer step into `parts` fragments while it is detached. If memory runs out, nothing
 * changes. */
onebit_status_t ob_outer_recut(struct onebit_outer *outer, size_t parts);

/* ob_outer_copy copies between memory of the executor and of the host; ob_outer_clear sets memory
 * to zero. */
onebit_status_t ob_outer_copy(const struct onebit_outer *outer, void *to, const void *from,
                              size_t bytes);
onebit_status_t ob_outer_clear(const struct onebit_outer *outer, void *memory, size_t bytes);
/* to_host replaces consensus, momentum, drift and parameters on a device by copies on the host, for
 * operations that are rare. from_host undoes that, and copies the arrays to the device if `changed`
 * is set. Without a device both do nothing. After a failure the arrays are those on the device. */
onebit_status_t ob_outer_to_host(struct onebit_outer *outer);
onebit_status_t ob_outer_from_host(struct onebit_outer *outer, bool changed);

/* The passes over a fragment's arrays on the host. read: reads the consensus from the parameters.
 * drift: computes the changes since the parameters were set, and returns whether they can be sent.
 * update: applies the outer rule. set_parameters: sets the parameters to the consensus, with that
 * mixing. */
void ob_fragment_read(struct ob_fragment *fragment);
bool ob_fragment_drift(struct ob_fragment *fragment);
void ob_fragment_update(struct ob_fragment *fragment);
void ob_fragment_set_parameters(const struct ob_fragment *fragment, double mixing);
/* Subtracts `by` from the parameters, unless it is zero. */
void ob_fragment_shift(const struct ob_fragment *fragment, const float *by);
/* Sets `count` elements, from element `first` on, to the consensus minus `ahead`, as far as the
 * option `mixing` says, and stores `ahead` in fragment->drift. */
void ob_fragment_set_ahead(struct ob_fragment *fragment, const float *ahead, size_t first,
                           size_t count);
uint32_t ob_fragment_checksum(const struct ob_fragment *fragment);

/* Waits for an exchange in flight, and does not apply it. Among sites ob_fragment_wait and
 * ob_fragment_abandon do nothing. */
void ob_fragment_wait(struct ob_fragment *fragment);
/* Applies an exchange that has ended. One that has not ended is given up, and its drift counts in
 * the next exchange. */
void ob_fragment_abandon(struct ob_fragment *fragment);

/* Checks that all ranks of comm have the same kind of outer step; their values may differ. */
onebit_status_t ob_outer_agree(struct onebit_outer *outer, onebit_comm_t comm,
                               onebit_status_t status);
/* Creates the plans of the fragments on outer->comm. Collective. */
onebit_status_t ob_outer_build(struct onebit_outer *outer);
onebit_status_t ob_outer_check_attached(const struct onebit_outer *outer);

/* Returns true if the row is an array of an outer step (enum ob_outer_array). */
static inline bool ob_outer_has_array(enum ob_saved what) { return !ob_saved_rows[what].stages; }
/* Returns the fragment's elements in a row; for a residual, those in its held array. */
static inline float *ob_fragment_array(const struct ob_fragment *fragment, enum ob_saved what) {
  const bool residual = what == OB_SAVED_WORKER || what == OB_SAVED_SERVER;
  return residual ? fragment->held[what - OB_SAVED_WORKER]
                  : fragment->array[ob_saved_rows[what].slot];
}
/* Fills in the held residuals, with zeros for elements that have no residual on this rank. */
onebit_status_t ob_outer_hold_residuals(struct onebit_outer *outer);
void ob_outer_release_held(struct onebit_outer *outer);

/* Exports a residual while no exchange is in flight: fragment->count values on the host, with zeros
 * for elements that this rank does not store. The import reads the elements that this rank stores;
 * `scratch` has fragment->count elements and may be `values`. */
onebit_status_t ob_outer_export_residual(const struct ob_fragment *fragment, enum ob_saved what,
                                         float *values);
onebit_status_t ob_outer_import_residual(struct ob_fragment *fragment, enum ob_saved what,
                                         const float *values, float *scratch);

/* --- The state of an outer step, as its checkpoints have it: a part of kind "outer"
 * (optimizers/checkpoint/checkpoint.h). Elements are numbered through all tensors; a fragment is
 * the elements from its first one on. */

struct ob_state ob_outer_state(struct onebit_outer *outer);

/* An exchange without sites is in one of the first three states. An exchange among sites is in the
 * first state, or in OB_OUTER_SENT if its drift will be sent again. */
enum ob_outer_state { OB_OUTER_IDLE, OB_OUTER_RECEIVED, OB_OUTER_SKIPPED, OB_OUTER_SENT };

/* The numbers of a fragment, which belong to one rank. */
struct ob_fragment_numbers {
  uint64_t count, state, remaining; /* remaining: local steps until it is applied */
  uint64_t finite;
  double weight, sent_weight, squares;
  uint64_t keeps; /* whether the residual is in the parameters */
};

struct ob_outer_numbers {
  uint64_t steps, position, local_steps;
  struct ob_fragment_numbers fragment[];
};

/* Returns how many numbers of 8 bytes an outer step has in struct ob_outer_numbers. */
static inline size_t ob_outer_number_count(const struct onebit_outer *outer) {
  return (sizeof(struct ob_outer_numbers) +
          outer->options.fragments * sizeof(struct ob_fragment_numbers)) /
         sizeof(uint64_t);
}

/* Waits for the exchanges in flight, and applies none. Collective. Fails if an exchange has failed,
 * but not if all ranks skip it. */
onebit_status_t ob_outer_settle(struct onebit_outer *outer);

/* Converts `position` in a round of `round` local steps to a position in this outer step's round.
 * The same fragment is next, and the same fraction of the steps before its exchange is over. */
size_t ob_outer_position(const struct onebit_outer *outer, size_t position, size_t round);

/* Frees the plans and communicators of exchanges, and holds the residuals. May be called again.
 * Local. */
onebit_status_t ob_outer_detach(struct onebit_outer *outer);
/* Implements onebit_outer_move. */
onebit_status_t ob_outer_rejoin(struct onebit_outer *outer, onebit_comm_t comm);

#endif
