/*
 * The oracle: the results of every collective and of 1-bit Adam, to the bit. It is written anew
 * from the formulas in the public headers, with float32 state, simple loops and all ranks in one
 * process, and uses nothing of the library but its enumerations.
 *
 *   worker   c = e + x    s = scale of c    e = c - s sign(c)    sent: sign(c), s
 *   server   t = sum in rank order of s_r * (1/P) * sign(c_r), then + d    likewise, d for e
 *   result   y = s sign(t), s the scale of t
 *
 * With bits > 1 an element is sent as the level of that width next to c / s, and decoded as
 * level * s. The scale s is the largest |c| of the block, or a multiple of its root mean
 * square where that is less, divided by the largest level.
 *
 * The residual e is stored as such. The scale of a block: element i of it goes to lane i mod 32,
 * each lane adds c * c (or |c|) in order, lanes are added by halving, then sqrt(sum / count) (or
 * sum / count) in double, rounded once. Where sums of blocks are added up, they go to 1024 lanes of
 * double in the same way.
 */
#ifndef ONEBIT_TESTS_ORACLE_H
#define ONEBIT_TESTS_ORACLE_H

#include <stdbool.h>
#include <stddef.h>

#include "onebit/onebit.h"
#include "onebit/plan.h"

/* Read element i of an array of dtype as float32; round a float32 to nearest even and store it. */
float oracle_load(const void *array, size_t i, onebit_dtype_t dtype);
void oracle_store(void *array, size_t i, onebit_dtype_t dtype, float value);

/* Does the same for a result or a parameter: a float16 saturates at +-65504 instead of infinity. */
void oracle_store_result(void *array, size_t i, onebit_dtype_t dtype, float value);

/* The accumulator of sums of blocks, initially zeros; oracle_total may be called once. */
struct oracle_sum {
  double lane[1024];
  size_t count;
};
void oracle_add(struct oracle_sum *sum, float of_block);
double oracle_total(struct oracle_sum *sum);

/* Return the sum of a run of non-negative values; the sum of squares of a run's values times a
 * factor. */
float oracle_run_sum(const float *values, size_t count);
float oracle_run_squares(const float *values, float factor, size_t count);

/* ---- Exchanges (oracle.c, oracle_layout.c) ---- */

/* Consecutive elements that are summed together and have one server. */
struct oracle_run {
  size_t first, count;
  int server; /* the number of the share that it is in */
};

struct oracle {
  onebit_plan_options_t options;
  /* The workers are the ranks; in the hierarchical schedule, which the options must name, the
   * hosts, with `each` ranks. */
  int size, each;
  size_t valid;        /* elements of the send buffer */
  size_t elements;     /* with the padding of profile deepspeed */
  size_t result_count; /* elements of all ranks' results together, or of the common result */
  /* The results' type: in an exchange (profile default) and an allgather scales are rounded to it
   * before they are sent, so that the residual includes the rounding error. oracle_call sets it. */
  onebit_dtype_t result_dtype;
  bool common_scale; /* one scale for all runs of a worker buffer, and of a server share */
  struct oracle_run *runs;
  size_t run_count;
  float *worker_error;          /* [size][elements] */
  float *server_error;          /* [elements]: each server's part at its place */
  float *compensated, *decoded; /* [size][elements]: of the latest call */
  float *parts; /* likewise, decoded with the scale divided by the number of workers */
};

/* Creates a plan of `count` elements on `size` ranks, with the options' operation. */
struct oracle *oracle_create(int size, size_t count, const onebit_plan_options_t *options);

/* Does the same on hosts with equally many consecutive ranks. */
struct oracle *oracle_create_hosts(int size, int hosts, size_t count,
                                   const onebit_plan_options_t *options);

/* Creates an allreduce of several tensors, one after the other in the send buffer; no block spans
 * two. */
struct oracle *oracle_create_tensors(int size, int hosts, const size_t *counts, size_t tensors,
                                     const onebit_plan_options_t *options);
void oracle_destroy(struct oracle *oracle);

/* Makes one call: inputs[r] is the send buffer of rank r, of the options' dtype. Writes
 * result_count elements of dtype: the common result, or for a reduce-scatter the ranks' results one
 * after the other. Returns false, and changes nothing, when the call is skipped. */
bool oracle_call(struct oracle *oracle, const void *const *inputs, void *result);

/* Does the same on float32, without the conversions: inputs[r] has `valid` elements. */
bool oracle_exchange(struct oracle *oracle, const float *const *inputs, float *result);

/* The parts of an allreduce, for an optimizer that changes the mean between them. oracle_reduce
 * writes the mean of the workers' messages and changes nothing; oracle_serve compresses the
 * servers' values, stores their residuals and writes the common result; oracle_keep_residuals
 * stores the workers' residuals. False means skipped: nothing has changed. */
bool oracle_reduce(struct oracle *oracle, const float *const *inputs, float *mean);
bool oracle_serve(struct oracle *oracle, const float *values, float *result);
void oracle_keep_residuals(struct oracle *oracle);

/* Sets all residuals to zero. */
void oracle_reset_residuals(struct oracle *oracle);

/* Return the first element and the length of the part of the worker residual that a rank keeps, and
 * that part. In the hierarchical schedule a rank keeps only a part. */
size_t oracle_worker_first(const struct oracle *oracle, int rank);
size_t oracle_worker_count(const struct oracle *oracle, int rank);
const float *oracle_worker_error(const struct oracle *oracle, int rank);

/* True if ranks serve shares; false if each rank computes the mean of all messages itself. */
bool oracle_has_servers(const struct oracle *oracle);

/* Return the first element and the length of the server residual that a rank keeps (length 0 unless
 * it is an allreduce). */
size_t oracle_server_first(const struct oracle *oracle, int rank);
size_t oracle_server_count(const struct oracle *oracle, int rank);

/* Cuts the elements into runs (oracle_layout.c). */
void oracle_lay_out(struct oracle *oracle, const size_t *counts, size_t tensors);

/* ---- Weights of gradients (oracle_weigh.c) */

struct oracle_weigher {
  onebit_optimizer_options_t options; /* with the defaults of the options that the oracle uses */
  int ranks;
  size_t share; /* not 0: all tensors form one buffer, of which a rank reduces `share` elements */
  double loss_scale, norm; /* norm: of the gradients in the latest step with clipping */
  size_t good_steps;       /* since the loss scale changed */
};

struct oracle_weigher oracle_weigher_of(const onebit_optimizer_options_t *options, int ranks);

/* Computes the factor of this step's gradients: gradients[r] is rank r's, all tensors one after the
 * other. Returns false if their norm is not finite. */
bool oracle_weigh(struct oracle_weigher *weigher, const float *const *gradients,
                  const size_t *counts, size_t tensors, float *factor);

/* Updates the loss scale after a step. */
void oracle_rescale(struct oracle_weigher *weigher, bool skipped);

/* ---- 1-bit Adam (oracle_adam.c) ---- */

struct oracle_adam {
  onebit_adam_options_t options; /* with the defaults filled in */
  struct oracle_weigher weigher;
  int size, each; /* workers, and ranks of each, as in struct oracle */
  size_t tensors, total;
  size_t *first, *count; /* of each tensor in the arrays below */
  float *weight_decay, *factor;
  bool *uncompressed;
  float *parameter, *momentum, *variance, *reciprocal; /* [total] */
  float *step;           /* [total]: sharded, the step after the ranks have exchanged it */
  float gradient_factor; /* of the latest step */
  float *means;          /* [size][total]: the mean gradients of each worker's ranks */
  const float *scaling;  /* NULL, or each tensor's factor of the momentum in the exchange */
  bool shares;           /* each rank keeps the momentum of the elements that it serves */
  bool compressed;
  size_t steps, freeze_step; /* freeze_step: warm-up steps made before the freeze */
  double *norms; /* norms of the variance after step t, bias-corrected if the options ask for it */
  size_t norms_capacity;
  double variance_ratio;
  /* One exchange for each bucket of tensors, from the last bucket on; in profile deepspeed one for
   * each tensor. Uncompressed tensors are in none. */
  struct oracle_exchange {
    struct oracle *oracle;
    size_t *tensor, tensors, total; /* which tensors, how many, and their elements */
  } * exchanges;
  size_t exchange_count;
};

/* Creates the optimizer of `size` ranks on hosts as in oracle_create_hosts. It starts with the
 * values of the tensors' parameters, of parameter_dtype; it keeps no pointer to them or to
 * gradients. */
struct oracle_adam *oracle_adam_create(int size, int hosts, const onebit_tensor_t *tensors,
                                       size_t count, const onebit_adam_options_t *options);
void oracle_adam_destroy(struct oracle_adam *adam);

/* Makes one step: gradients[r] is rank r's, all tensors one after the other, as float32. Returns
 * false, and changes only the loss scale, when the step is skipped. */
bool oracle_adam_step(struct oracle_adam *adam, const float *const *gradients, float learning_rate);

/* These parts of a step serve other optimizers too. The first fills `means` with the mean of each
 * worker's ranks, of values[r] times a factor, and the second with that of gradients; both return
 * false if a mean is not finite. */
bool oracle_average(struct oracle_adam *adam, const float *const *values, float factor);
bool oracle_average_gradients(struct oracle_adam *adam, const float *const *gradients);

/* Returns the mean over the workers. */
float oracle_mean_gradient(const struct oracle_adam *adam, size_t i);

/* A worker's input of an exchange: `value` of worker w's element `at` of the exchange, which is
 * element i of the optimizer. */
typedef float oracle_value(const void *context, const struct oracle_exchange *exchange, size_t w,
                           size_t at, size_t i);
float **oracle_inputs(const struct oracle_adam *adam, const struct oracle_exchange *exchange,
                      oracle_value *value, const void *context);
void oracle_free_inputs(const struct oracle_adam *adam, float **inputs);

/* Copy the elements of an exchange to their places in an array of all elements, and back. */
void oracle_scatter(const struct oracle_adam *adam, const struct oracle_exchange *exchange,
                    const float *from, float *to);
void oracle_gather(const struct oracle_adam *adam, const struct oracle_exchange *exchange,
                   const float *from, float *to);

/* Makes all exchanges, with the inputs that `value` computes; the results become the momentum. */
bool oracle_exchange_all(struct oracle_adam *adam, oracle_value *value, const void *context);

/* Subtracts rate * (step + decay * p) from a tensor's parameters p. */
void oracle_apply_step(struct oracle_adam *adam, size_t k, const float *step, float learning_rate);

/* Returns 1 / sqrt(value), approximated as in the library; and rounds a value to the bfloat16 above
 * or below it, chosen by the low half of `chance`, as moments of normalised gradients need. */
float oracle_reciprocal_root(float value);
float oracle_rounded_by_chance(float value, float chance);

/* Return 1 / (1 - b1^t) and 1 / sqrt(1 - b2^t), or 1 without bias correction. */
float oracle_momentum_correction(const struct oracle_adam *adam, size_t t);
float oracle_variance_correction(const struct oracle_adam *adam, size_t t);

/* Makes Adam's step of one tensor with the mean gradients; the step has been counted. */
void oracle_adam_whole_step(struct oracle_adam *adam, size_t k, float learning_rate);

/* Limits a step with a frozen variance to ONEBIT_STEP_BOUND, except in profile deepspeed. */
float oracle_bound_step(const struct oracle_adam *adam, float step);

/* True if this warm-up step, which has been counted, is the last. */
bool oracle_must_freeze(struct oracle_adam *adam);
/* Ends the warm-up after this step. */
void oracle_freeze(struct oracle_adam *adam);

/* The value of element i that worker w adds to the momentum of the compressed stage. Where the
 * gradient itself is compressed, its weight and the optimizer's factor are multiplied first; in the
 * hierarchical schedule a host's mean is compressed. */
float oracle_own_gradient(const struct oracle_adam *adam, const float *const *gradients, size_t w,
                          size_t i);

#endif
