/*
 * The oracle computes the results of every collective and of 1-bit Adam, to the bit. It was written
 * separately, from the formulas in the public headers, with float32 state, simple loops and all
 * ranks in one process. It uses nothing of the library except the enumerations.
 *
 *   worker   c = e + x    s = scale of c    e = c - s sign(c)    sent: sign(c), s
 *   server   t = sum in rank order of s_r * (1/P) * sign(c_r), then + d    likewise, with d for e
 *   result   y = s sign(t), s the scale of t
 *
 * With bits > 1 an element is sent as the level of that width that is nearest to c / s, and decoded
 * as level * s. The scale s is the largest |c| of the block divided by the largest level. If a
 * certain multiple of the block's root mean square is less than the largest |c|, it replaces the
 * largest |c|.
 *
 * The residual e is stored in float32. The sum of a block is computed in 32 lanes: element i goes
 * to lane i mod 32, and each lane adds c * c (or |c|) in order. The lanes are then added by
 * halving. The scale is sqrt(sum / count) (or sum / count) in double, rounded once. Sums of several
 * blocks are added in the same way, in 1024 lanes of double.
 */
#ifndef ONEBIT_TESTS_ORACLE_H
#define ONEBIT_TESTS_ORACLE_H

#include <stdbool.h>
#include <stddef.h>

#include "onebit/onebit.h"
#include "onebit/plan.h"

/* oracle_load returns element i of an array of dtype, converted to float32. oracle_store rounds a
 * float32 value to dtype, ties to even, and stores it. */
float oracle_load(const void *array, size_t i, onebit_dtype_t dtype);
void oracle_store(void *array, size_t i, onebit_dtype_t dtype, float value);

/* Stores a result or a parameter like oracle_store, except that a float16 saturates at +-65504
 * instead of becoming infinite. */
void oracle_store_result(void *array, size_t i, onebit_dtype_t dtype, float value);

/* The accumulator for the sums of blocks, initially zeros. oracle_total may be called only once. */
struct oracle_sum {
  double lane[1024];
  size_t count;
};
void oracle_add(struct oracle_sum *sum, float of_block);
double oracle_total(struct oracle_sum *sum);

/* oracle_run_sum returns the sum of a run of non-negative values. oracle_run_squares returns the
 * sum of squares of a run's values times a factor. */
float oracle_run_sum(const float *values, size_t count);
float oracle_run_squares(const float *values, float factor, size_t count);

/* ---- Exchanges (oracle.c, oracle_layout.c) ---- */

/* Consecutive elements that are summed together and belong to one server. */
struct oracle_run {
  size_t first, count;
  int server; /* the number of the server's share that contains the run */
};

struct oracle {
  onebit_plan_options_t options;
  /* The workers are the ranks. In the hierarchical schedule, which the options must name, the
   * workers are the hosts, with `each` ranks per host. */
  int size, each;
  size_t valid;        /* elements of the send buffer */
  size_t elements;     /* with the padding of profile deepspeed */
  size_t result_count; /* elements of the common result, or of all ranks' results together */
  /* The dtype of the results. In an allreduce by exchange (profile default) and in an allgather,
   * scales are rounded to this dtype before they are sent, so that the residual includes the
   * rounding error. oracle_call sets it. */
  onebit_dtype_t result_dtype;
  bool common_scale; /* one scale for a whole worker buffer, and one for a server's share */
  struct oracle_run *runs;
  size_t run_count;
  float *worker_error;          /* [size][elements] */
  float *server_error;          /* [elements]: the residuals of all servers */
  float *compensated, *decoded; /* [size][elements], in the latest call */
  float *parts;                 /* like `decoded`, with scales divided by the number of workers */
};

/* Creates a plan of `count` elements on `size` ranks, with the options' operation. */
struct oracle *oracle_create(int size, size_t count, const onebit_plan_options_t *options);

/* Creates a plan like oracle_create, on hosts with equally many consecutive ranks. */
struct oracle *oracle_create_hosts(int size, int hosts, size_t count,
                                   const onebit_plan_options_t *options);

/* Creates an allreduce of several tensors, which follow one another in the send buffer. No block
 * contains elements of two tensors. */
struct oracle *oracle_create_tensors(int size, int hosts, const size_t *counts, size_t tensors,
                                     const onebit_plan_options_t *options);
void oracle_destroy(struct oracle *oracle);

/* Makes one call. inputs[r] is the send buffer of rank r, of the options' dtype. Writes
 * result_count elements of dtype: the common result, or for a reduce-scatter the ranks' results one
 * after the other. If the call is skipped, returns false and changes nothing. */
bool oracle_call(struct oracle *oracle, const void *const *inputs, void *result);

/* Makes one call on float32 values, without conversions. inputs[r] has `valid` elements. */
bool oracle_exchange(struct oracle *oracle, const float *const *inputs, float *result);

/* The two halves of an allreduce, for an optimizer that changes the mean between them.
 * oracle_reduce writes the mean of the workers' messages and changes nothing. oracle_serve
 * compresses the servers' values, stores their residuals and writes the common result.
 * oracle_keep_residuals stores the workers' residuals. A return value of false means that the call
 * is skipped and nothing has changed. */
bool oracle_reduce(struct oracle *oracle, const float *const *inputs, float *mean);
bool oracle_serve(struct oracle *oracle, const float *values, float *result);
void oracle_keep_residuals(struct oracle *oracle);

/* Sets all residuals to zero. */
void oracle_reset_residuals(struct oracle *oracle);

/* Return the part of the worker residual that a rank stores: its first element, its length, and the
 * part itself. A rank stores the whole residual, except in the hierarchical schedule. */
size_t oracle_worker_first(const struct oracle *oracle, int rank);
size_t oracle_worker_count(const struct oracle *oracle, int rank);
const float *oracle_worker_error(const struct oracle *oracle, int rank);

/* True if each rank reduces a share as a server. False if each rank computes the mean of all
 * messages itself. */
bool oracle_has_servers(const struct oracle *oracle);

/* Return the first element and the length of the server residual that a rank stores. The length is
 * 0 unless the operation is an allreduce. */
size_t oracle_server_first(const struct oracle *oracle, int rank);
size_t oracle_server_count(const struct oracle *oracle, int rank);

/* Cuts the elements into runs (oracle_layout.c). */
void oracle_lay_out(struct oracle *oracle, const size_t *counts, size_t tensors);

/* ---- Weights of gradients (oracle_weigh.c) */

struct oracle_weigher {
  onebit_optimizer_options_t options; /* defaults are filled in where the oracle uses them */
  int ranks;
  size_t share; /* if not 0, all tensors form one buffer, and each rank reduces `share` elements of
                 * it */
  double loss_scale, norm; /* norm: gradient norm of the latest step with clipping */
  size_t good_steps;       /* steps since the loss scale last changed */
};

struct oracle_weigher oracle_weigher_of(const onebit_optimizer_options_t *options, int ranks);

/* Computes the factor by which this step's gradients are multiplied (accumulation, loss scale,
 * clipping). gradients[r] has rank r's gradients, all tensors one after the other. Returns false if
 * their norm is not finite. */
bool oracle_weigh(struct oracle_weigher *weigher, const float *const *gradients,
                  const size_t *counts, size_t tensors, float *factor);

/* Updates the loss scale after a step. */
void oracle_rescale(struct oracle_weigher *weigher, bool skipped);

/* ---- 1-bit Adam (oracle_adam.c) ---- */

struct oracle_adam {
  onebit_adam_options_t options; /* with the defaults filled in */
  struct oracle_weigher weigher;
  int size, each; /* the number of workers, and ranks per worker, as in struct oracle */
  size_t tensors, total;
  size_t *first, *count; /* [tensors]: each tensor's first element and length in the arrays below */
  float *weight_decay, *factor;
  bool *uncompressed;
  float *parameter, *momentum, *variance, *reciprocal; /* [total] */
  float *step;           /* [total]; with sharded state, the step that the ranks have exchanged */
  float gradient_factor; /* factor of the latest gradients */
  float *means;          /* [size][total]: the mean gradients of each worker's ranks */
  const float *scaling;  /* NULL, or each tensor's factor of the momentum in the exchange */
  bool shares;           /* sharded: each rank stores the momentum only of the elements that it
                          * reduces */
  bool compressed;
  size_t steps, freeze_step; /* freeze_step: the number of warm-up steps */
  double *norms; /* norms[t]: norm of the variance after step t, bias-corrected if the options ask
                  * for it */
  size_t norms_capacity;
  double variance_ratio;
  /* One exchange for each bucket of tensors, starting with the last bucket. Profile deepspeed has
   * one exchange for each tensor. Uncompressed tensors are in no exchange. */
  struct oracle_exchange {
    struct oracle *oracle;
    size_t *tensor, tensors, total; /* numbers of the tensors, their count, and the sum of their
                                     * elements */
  } * exchanges;
  size_t exchange_count;
};

/* Creates the optimizer of `size` ranks on hosts as in oracle_create_hosts. It starts with the
 * values of the tensors' parameters, which are of parameter_dtype. It stores no pointer to the
 * parameters or gradients. */
struct oracle_adam *oracle_adam_create(int size, int hosts, const onebit_tensor_t *tensors,
                                       size_t count, const onebit_adam_options_t *options);
void oracle_adam_destroy(struct oracle_adam *adam);

/* Makes one step. gradients[r] has rank r's gradients, all tensors one after the other, as float32.
 * If the step is skipped, returns false and changes only the loss scale. */
bool oracle_adam_step(struct oracle_adam *adam, const float *const *gradients, float learning_rate);

/* Parts of a step that other optimizers also use. oracle_average stores in `means` each worker's
 * mean of values[r] over its ranks, times a factor. oracle_average_gradients does so with the
 * gradients. Both return false if a mean is not finite. */
bool oracle_average(struct oracle_adam *adam, const float *const *values, float factor);
bool oracle_average_gradients(struct oracle_adam *adam, const float *const *gradients);

/* Returns the mean gradient of element i over the workers. */
float oracle_mean_gradient(const struct oracle_adam *adam, size_t i);

/* Returns a worker's input of an exchange. The element has number `at` in the exchange and number i
 * in the optimizer. */
typedef float oracle_value(const void *context, const struct oracle_exchange *exchange, size_t w,
                           size_t at, size_t i);
float **oracle_inputs(const struct oracle_adam *adam, const struct oracle_exchange *exchange,
                      oracle_value *value, const void *context);
void oracle_free_inputs(const struct oracle_adam *adam, float **inputs);

/* oracle_scatter copies the elements of an exchange to their positions in an array of all elements.
 * oracle_gather copies them back. */
void oracle_scatter(const struct oracle_adam *adam, const struct oracle_exchange *exchange,
                    const float *from, float *to);
void oracle_gather(const struct oracle_adam *adam, const struct oracle_exchange *exchange,
                   const float *from, float *to);

/* Makes all exchanges, with the inputs that `value` computes. The results become the momentum. */
bool oracle_exchange_all(struct oracle_adam *adam, oracle_value *value, const void *context);

/* Subtracts rate * (step + decay * p) from a tensor's parameters p. */
void oracle_apply_step(struct oracle_adam *adam, size_t k, const float *step, float learning_rate);

/* oracle_reciprocal_root returns 1 / sqrt(value), with the library's approximation.
 * oracle_rounded_by_chance rounds a value to the bfloat16 above or below it; the low half of
 * `chance` determines which. The second moments of Efficient-Adam and Lion are rounded in this
 * way. */
float oracle_reciprocal_root(float value);
float oracle_rounded_by_chance(float value, float chance);

/* Return the bias corrections 1 / (1 - b1^t) and 1 / sqrt(1 - b2^t), or 1 without bias
 * correction. */
float oracle_momentum_correction(const struct oracle_adam *adam, size_t t);
float oracle_variance_correction(const struct oracle_adam *adam, size_t t);

/* Makes dense Adam's step on tensor k with the mean gradients. The caller has already counted the
 * step. */
void oracle_adam_whole_step(struct oracle_adam *adam, size_t k, float learning_rate);

/* Limits a step with a frozen variance to ONEBIT_STEP_BOUND, except in profile deepspeed. */
float oracle_bound_step(const struct oracle_adam *adam, float step);

/* True if the current warm-up step, which the caller has already counted, is the last one. */
bool oracle_must_freeze(struct oracle_adam *adam);
/* Ends the warm-up after this step. */
void oracle_freeze(struct oracle_adam *adam);

/* Returns the value of element i that worker w adds to the momentum of the compressed stage. If
 * gradients themselves are compressed, their weight and the optimizer's factor are multiplied with
 * each other first. In the hierarchical schedule the worker is a host, and its ranks' mean is
 * compressed. */
float oracle_own_gradient(const struct oracle_adam *adam, const float *const *gradients, size_t w,
                          size_t i);

#endif
