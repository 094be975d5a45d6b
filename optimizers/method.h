/*
 * The table of methods. A row has the functions and settings that differ between optimizers, and is
 * in the file of its optimizer. This header also has the rows of options, and the values that
 * options become. The arithmetic of optimizers is in compression/pass_element.h, and the rules of
 * servers that do not send the mean are in compression/numerics.h (enum ob_serve_rule).
 */
#ifndef OB_OPTIMIZERS_METHOD_H
#define OB_OPTIMIZERS_METHOD_H

#include <stddef.h>

#include "collectives/communicator.h"
#include "collectives/plan.h"
#include "onebit/adam.h"
#include "onebit/statistics.h"
#include "optimizers/methods/lamb_tensor.h"

struct onebit_optimizer;
struct ob_method;
struct ob_recipe;
struct ob_bucket;

/* The form in which a step sends gradients. */
enum ob_exchange { OB_EXCHANGE_DENSE, OB_EXCHANGE_BITS, OB_EXCHANGE_NONE };

/* --- Options, as rows of a table. A row has the name of an option, its offset in the caller's
 * struct and in struct ob_moments, the default that a zero stands for, and its range. Defaults,
 * checks and the agreement of all ranks are loops over the rows. */

enum ob_option_kind {
  OB_OPTION_REAL,     /* double, checked by the method */
  OB_OPTION_FRACTION, /* double between 0 and 1 */
  OB_OPTION_POSITIVE, /* double that is positive as a float; 0 only without a default */
  OB_OPTION_COUNT,    /* size_t */
  OB_OPTION_FLAG,     /* int: zero or not */
  OB_OPTION_CHOICE    /* an enum, from 0 to `max`; if max is 0, plans check it when they are made */
};

struct ob_option {
  /* term: the name of the term by which ranks agree on the option; for a double it begins with
   * OB_TERM_DOUBLE. */
  const char *name, *term;
  enum ob_option_kind kind;
  /* Offsets in the caller's struct and in struct ob_moments; both have the same type. */
  size_t from, to;
  double fallback;
  int max;
  const char *type; /* the name of the enum, for error messages */
};

/* Macros for rows of options. The file that includes this header defines OPTIONS, the caller's
 * struct; `field` is a field of that struct, and `to` the field of struct ob_moments that it
 * sets. */
/* clang-format off */
#define OB_OFFSETS(field, to) offsetof(OPTIONS, field), offsetof(struct ob_moments, to)
#define OB_DOUBLE(kind, field, to, fallback) \
  {#field, OB_TERM_DOUBLE #field, kind, OB_OFFSETS(field, to), fallback, 0, NULL}
#define OB_REAL(field, to, fallback)     OB_DOUBLE(OB_OPTION_REAL, field, to, fallback)
#define OB_FRACTION(field, to, fallback) OB_DOUBLE(OB_OPTION_FRACTION, field, to, fallback)
#define OB_POSITIVE(field, to, fallback) OB_DOUBLE(OB_OPTION_POSITIVE, field, to, fallback)
#define OB_COUNT(field) {#field, #field, OB_OPTION_COUNT, OB_OFFSETS(field, field), 0, 0, NULL}
#define OB_FLAG(field)  {#field, #field, OB_OPTION_FLAG, OB_OFFSETS(field, field), 0, 0, NULL}
#define OB_CHOICE(field, max, type) \
  {#field, #field, OB_OPTION_CHOICE, OB_OFFSETS(field, field), 0, max, type}

/* The rows that several optimizers have. */
#define OB_ADAM_OPTIONS \
  OB_FRACTION(beta1, beta1, 0.9), OB_FRACTION(beta2, beta2, 0.999), \
  OB_POSITIVE(epsilon, epsilon, 1e-8)
#define OB_FREEZE_OPTIONS \
  OB_COUNT(freeze_step), OB_FRACTION(freeze_threshold, freeze_threshold, 0.96), \
  OB_FLAG(no_bias_correction)
/* clang-format on */

/* Reads options from a struct, or if `from` is NULL sets all defaults. For a wrong option it
 * returns ONEBIT_ERROR_ARGUMENT, with the option's name and value. */
onebit_status_t ob_options_read(const struct ob_option *rows, size_t count, const void *from,
                                void *to);
/* The number of options that all optimizers have, without threads and device. */
enum { OB_COMMON_OPTIONS = 19 };
extern const struct ob_option ob_common_options[];
/* Lists the options' values as terms, on which all ranks must agree. */
void ob_options_list_terms(const struct ob_option *rows, size_t count, const void *to,
                           struct ob_term *terms);

/* Check one option: ob_check_fraction, that it is between 0 and 1; ob_check_positive, that it is
 * positive as a float. */
onebit_status_t ob_check_fraction(const char *name, double value);
onebit_status_t ob_check_positive(const char *name, double value);
/* Fails unless 0 < min <= max. */
onebit_status_t ob_check_order(const char *min_name, double min, const char *max_name, double max);
/* Fails unless `tensor` is an index of a list of `count` tensors. */
onebit_status_t ob_check_tensor(size_t tensor, size_t count);
/* Returns the value, or the default if the value is 0. */
double ob_value_or_default(double value, double fallback);

/* --- Methods */

/* Numbers of a method that a checkpoint must contain: `count` numbers of 8 bytes each. A loaded
 * number must lie in min .. max. */
enum ob_numbers_kind { OB_NUMBERS_WHOLE /* uint64_t */, OB_NUMBERS_REAL /* double */ };

struct ob_numbers {
  enum ob_numbers_kind kind;
  void *at;
  size_t count;
  double min, max;
};

enum { OB_MAX_NUMBERS = 16 };

/* The parameters of an optimizer: its options with every default filled in, and settings of its
 * method. */
struct ob_moments {
  double beta1, beta2, epsilon;
  int no_bias_correction;
  bool no_dampening;  /* a gradient is added to the momentum without the factor 1 - beta1 */
  bool no_warmup;     /* the first step is compressed; freeze_step is ONEBIT_FREEZE_NEVER */
  size_t freeze_step; /* as in onebit_adam_options_t */
  double freeze_threshold;
  onebit_adam_exchange_t exchange;
  onebit_shards_t shards;
  size_t warmup_steps; /* sets freeze_step in momentum SGD and Efficient-Adam */
  double gain;         /* Efficient-Adam: the factor of normalised gradients */
  int trust_ratio;
  /* The beta of the momentum that servers keep, in methods in which beta2 is that of the ranks' own
   * moments. */
  double server_beta;
  struct ob_lamb_limits limits;
  /* Options of 0/1 Adam. */
  size_t variance_freeze_step, variance_update_scaler, local_step_scaler, local_step_clipper;
};

/* A row of the table of methods: the functions and settings that differ between optimizers. */
struct ob_method {
  const char *name;
  /* The options of the method: their rows, the size of the caller's struct, the offset of the
   * common options in it, and the name of the initialiser macro. `initial` has the fields that are
   * the same for all optimizers of the method. */
  const struct ob_option *options;
  size_t option_count, options_size, common_at;
  const char *options_init;
  struct ob_moments initial;
  /* recommended: the optimizer to use instead, if this one with its default options ends with a
   * higher loss than its uncompressed form; else NULL. not_where: the models for which the loss is
   * higher; NULL: most. */
  const char *recommended, *not_where;
  /* If DeepSpeed has no such optimizer, the name of this one in the error message; else NULL. */
  const char *not_deepspeeds;
  /* Called when options have been read: sets the values that follow from them, and checks
   * combinations. It may choose another row of the table, and create recipe->own. NULL: there is
   * nothing to do. */
  onebit_status_t (*resolve)(struct ob_recipe *recipe, size_t ntensors);
  /* True if the method sends momentum: each exchanged value depends on the last exchange's
   * result. */
  bool momentum;
  bool begins_frozen; /* a checkpoint may be frozen at step 0, even if options ask for a warm-up */
  bool fused;         /* profile deepspeed compresses all tensors in one buffer */
  bool lamb;          /* optimizer->own is a struct ob_lamb */
  bool sharded;       /* a bucket has only the state of this rank's shard (adam.c) */
  bool moments;       /* buckets' plans keep moments of this rank's own gradients */
  /* True if the warm-up exchanges divided gradients in warmup_bits (efficient_adam.c). The
   * variances are released when the warm-up ends. */
  bool divides;
  enum ob_serve_rule serve_rule; /* the rule by which servers reduce messages */
  unsigned arrays;               /* slots that are arrays of a bucket's own, as OB_MASKs */
  /* Creates further objects of the optimizer after the buckets: collective. NULL: there are
   * none. */
  onebit_status_t (*create)(struct onebit_optimizer *optimizer);
  /* Creates the plans of a bucket from the shapes of the usual two plans. Collective. NULL: the
   * usual two plans are created. */
  onebit_status_t (*plans)(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                           const struct ob_plan_shape *bits, const struct ob_plan_shape *dense,
                           size_t count);
  /* sums returns the plan that a warm-up step exchanges besides the buckets' plans, or NULL;
   * variance computes the sum of all ranks' variances from its result. NULL: neither is needed,
   * since each rank has all variances. */
  onebit_plan_t (*sums)(const struct onebit_optimizer *optimizer);
  double (*variance)(const struct onebit_optimizer *optimizer);
  /* Make the whole step of uncompressed tensors from mean gradients, by a function or a pass. If
   * there is neither, `update` makes that step. */
  onebit_status_t (*dense)(struct onebit_optimizer *optimizer, struct ob_bucket *bucket);
  enum ob_pass_kind dense_pass;
  /* Returns the form of the next step's exchange, which must only depend on how earlier steps
   * ended. NULL: ob_optimizer_exchange determines it. */
  enum ob_exchange (*exchange)(const struct onebit_optimizer *optimizer);
  /* Prepares the values that a compressed bucket is about to send. NULL: they need no
   * preparation. */
  onebit_status_t (*prepare)(struct onebit_optimizer *optimizer, struct ob_bucket *bucket);
  /* Completes a call of a compressed bucket in the warm-up. NULL: it is complete. */
  void (*call_dense)(struct onebit_optimizer *optimizer, struct ob_bucket *bucket,
                     struct ob_call *call);
  /* Sets the source, sink and hold of a compressed call. */
  void (*call)(struct onebit_optimizer *optimizer, struct ob_bucket *bucket, struct ob_call *call);
  /* Called when the exchanges of a step have ended on all ranks, before held results are applied.
   * NULL: held results are applied, and nothing else is done. */
  onebit_status_t (*update)(struct onebit_optimizer *optimizer);
  /* Freezes the state after the last step of the warm-up (freeze.c). NULL: the stage never
   * changes. */
  onebit_status_t (*freeze)(struct onebit_optimizer *optimizer);
  /* Called instead of `freeze` when a step is made and counted: changes the stage if that is
   * due. */
  onebit_status_t (*advance)(struct onebit_optimizer *optimizer);
  /* Releases optimizer->own. NULL: there is none. */
  void (*destroy)(struct onebit_optimizer *optimizer);
  /* Adds the method's statistics of a tensor besides norms. NULL: none. */
  onebit_status_t (*add_statistics)(const struct onebit_optimizer *optimizer, size_t tensor,
                                    onebit_tensor_statistics_t *statistics);
  /* Lists the state besides the buckets' arrays, for checkpoints; returns the length of the list.
   * NULL: there is none. */
  size_t (*numbers)(struct onebit_optimizer *optimizer, struct ob_numbers list[OB_MAX_NUMBERS]);
  /* Returns a list with a factor for each tensor, by which its momentum is multiplied in messages.
   * NULL: all factors are 1. */
  double *(*scalings)(struct onebit_optimizer *optimizer);
  /* Returns true if parameters and momentum differ between ranks now. NULL: never. */
  bool (*apart)(const struct onebit_optimizer *optimizer);
  /* Returns true if learning rates are being summed for a later step on their sum; new factors and
   * weight decays take effect after that step. NULL: never. */
  bool (*adds_rates)(const struct onebit_optimizer *optimizer);
};

/* The names of the methods, and a list of the methods that ends with NULL. */
#define OB_METHODS(row)                                                                            \
  row(efficient_adam) row(adam) row(lamb) row(zero_one_adam) row(momentum) row(lion)
#define OB_METHOD_DECLARED(name) extern const struct ob_method ob_method_##name;
OB_METHODS(OB_METHOD_DECLARED)
#undef OB_METHOD_DECLARED
#define OB_METHOD_COUNTED(name) +1
enum { OB_METHOD_COUNT = OB_METHODS(OB_METHOD_COUNTED) };
#undef OB_METHOD_COUNTED
/* Returns a method's index in the list; OB_METHOD_COUNT: no method has that name. */
size_t ob_method_index(const char *name);
#define OB_METHOD_LISTED(name) &ob_method_##name,
static const struct ob_method *const ob_methods[] = {OB_METHODS(OB_METHOD_LISTED) NULL};
#undef OB_METHOD_LISTED

/* The result of reading and checking the arguments of a create call, before anything is made. */
struct ob_recipe {
  onebit_status_t status;         /* the status of this rank so far, with its error message */
  const struct ob_method *asked;  /* the row whose options were given */
  const struct ob_method *method; /* that row, or another one that the options choose */
  struct ob_moments moments;
  onebit_optimizer_options_t common; /* with defaults filled in */
  void *own;                         /* becomes optimizer->own, or is released; plain memory */
};

/* Defines the public function that creates the optimizer of one row of the table of methods. */
#define OB_METHOD_CREATE(name)                                                                     \
  onebit_status_t onebit_##name##_create(                                                          \
      onebit_comm_t comm, const onebit_tensor_t *tensors, size_t ntensors,                         \
      const onebit_##name##_options_t *options, onebit_optimizer_t *optimizer) {                   \
    OB_CALL_SCOPE;                                                                                 \
    return ob_optimizer_create(comm, &ob_method_##name, options, tensors, ntensors, optimizer);    \
  }

/* Sets the members of a row that describe its options; OPTIONS is their struct. */
#define OB_OPTIONS(init, rows)                                                                     \
  .options = (rows), .option_count = sizeof(rows) / sizeof((rows)[0]),                             \
  .options_size = sizeof(OPTIONS), .common_at = offsetof(OPTIONS, common), .options_init = (init)

#endif
