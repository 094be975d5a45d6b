/*
 * Test cases of 1-bit Adam. The functions that run a case and compare it with the oracle work for
 * ranks that are threads and for MPI ranks. Cases of other optimizers set `kind` and run in the
 * same way.
 */
#ifndef ONEBIT_TESTS_SUPPORT_ADAM_H
#define ONEBIT_TESTS_SUPPORT_ADAM_H

#include "optimizers/method.h"
#include "tests/oracle.h"
#include "tests/support.h"

#define LENGTH(list) (sizeof(list) / sizeof(list)[0])

struct adam_tensor {
  size_t count;
  float weight_decay, factor;
};
struct adam_tensors {
  size_t count;
  struct adam_tensor list[10];
};

/* The tensors of adam_tensors_odd have odd sizes. Some are empty, one has a single element, and
 * some have a weight decay or a learning rate of their own. */
extern const struct adam_tensors adam_tensors_odd, adam_tensors_one, adam_tensors_many_words,
    adam_tensors_tiny, adam_tensors_none;

/* The calls that make a step. IN_ONE_CALL: onebit_optimizer_step alone. BACKWARD, FORWARD and
 * SHUFFLED: gradients are also reported as ready, from the last tensor on, from the first, or in an
 * order that differs by rank and step. PARTLY: each rank reports only half of the gradients, and
 * makes every third step in one call. */
enum adam_form { IN_ONE_CALL, BACKWARD, FORWARD, SHUFFLED, PARTLY, ADAM_FORMS };

struct optimizer_kind;

struct adam_case {
  const struct optimizer_kind *kind; /* NULL: 1-bit Adam */
  const void *more;                  /* NULL, or options that only this kind has */
  int size, steps;
  int hosts;                     /* number of hosts, with equally many ranks; 0 means 1 */
  onebit_adam_options_t options; /* other kinds use their options of the same names; freeze_step
                                  * also gives warmup_steps, and beta1 also gives momentum */
  const struct adam_tensors *tensors;
  enum adam_form form;
  bool still;   /* every 13th element never gets a gradient */
  int late;     /* if not 0: every 7th element, and all elements of the last tensor, get
                 * their first gradient in this step */
  float growth; /* if not 0: gradients are multiplied by growth^step */
  float poison; /* if not 0: before each step, a step is made in which a gradient of poisoned_rank
                 * has this value, so that all ranks skip it */
  int poisoned_rank, poisoned_from; /* poisoned_from: the first step before which a skipped step is
                                     * made */
  float multiple; /* if not 0: arrays contain the gradients times this number (and times the loss
                   * scale); the option gradient_factor removes it */
  size_t absent;  /* if not 0: one in `absent` gradients is NULL; which ones depends on tensor, rank
                   * and step */
  unsigned uncompressed; /* bit k: tensor k stays uncompressed */
  unsigned tables;       /* bit k: tensor k is a table */
  bool moving;           /* in every second step, gradients are in another array */
  const int *widths;     /* NULL, or the bits per element of each step's messages. In such cases
                          * beta1 is 1/2 without bias correction, so that products with levels are
                          * exact */
};

/* The oracle's state after each step. */
struct adam_run {
  const struct adam_case *what;
  struct adam_moment {
    float *parameters; /* the master values of all tensors, one after the other */
    bool compressed;
    size_t freeze_step;
    double variance_ratio, gradient_norm;
    double before, after;                  /* the loss scale in this step and after it */
    double *momentum_norm, *residual_norm; /* [size]: norms of each rank's state */
  } * moments;                             /* [steps] */
  float *start;
  size_t total;
};

/* An optimizer: its row in the table of methods, and its oracle. `state` returns the struct
 * oracle_adam in the oracle, with the tensors, exchanges and moments. */
struct optimizer_kind {
  const char *name; /* the name that onebit_optimizer_get_info returns */
  const struct ob_method *method;
  void *(*oracle)(int size, int hosts, const onebit_tensor_t *tensors, size_t count,
                  const void *options);
  struct oracle_adam *(*state)(void *oracle);
  bool (*step)(void *oracle, const float *const *gradients, float learning_rate);
  void (*destroy)(void *oracle);
};

/* kind_efficient_lamb is Efficient-Adam with trust ratios. */
extern const struct optimizer_kind kind_adam, kind_lamb, kind_momentum, kind_lion,
    kind_efficient_adam, kind_efficient_lamb;

struct adam_run adam_prepare(const struct adam_case *what);
void adam_release(struct adam_run *run);

/* Runs the case on one rank. After each step the parameters must equal the oracle's to the bit.
 * This is a rank_body whose context is the struct adam_run. */
void adam_on_rank(onebit_comm_t comm, void *run);

/* Prepares the case and runs it with threads as ranks, on the hosts of the case. */
void adam_check(const struct adam_case *what);

/* Checks the case on groups of 1, 2, 3, 4 and 7 ranks, whatever its `size` is. If only a share of
 * the tests runs, test_wanted may leave out some of the groups. */
void adam_check_on_groups(struct adam_case what);

/* Checks the case with every codec of this machine, each with one to three threads. */
void adam_check_codecs(struct adam_case what);

/* adam_gradient fills the gradient of all tensors on a rank at a step. adam_learning_rate returns
 * the learning rate of a step. */
void adam_gradient(const struct adam_case *what, float *gradient, size_t total, int rank, int step);
float adam_learning_rate(int step);

/* square_sum returns the sum of squares. is_close is true if two norms differ only by the order of
 * additions. */
double square_sum(const float *values, size_t count);
bool is_close(double actual, double wanted);

/* One rank's arrays for the optimizer, with the case's dtypes. `values` holds the gradients in
 * float32. */
struct adam_learner {
  char *parameters, *gradients[2];
  float *values;
  onebit_tensor_t tensors[10];
  size_t first[10], total;
};

/* Creates the arrays. The parameters are the same on all ranks. */
struct adam_learner learner_make(const struct adam_case *what);
void learner_free(struct adam_learner *learner);

/* learner_set_gradients writes a step's gradients to their array. If the array's address may
 * change, it also passes the address to the optimizer. learner_oracle_gradient computes the same
 * gradients as the oracle needs them. */
void learner_set_gradients(const struct adam_case *what, struct adam_learner *learner,
                           onebit_optimizer_t optimizer, int rank, int step);
void learner_oracle_gradient(const struct adam_case *what, const struct adam_learner *learner,
                             double loss_scale, int rank, int step, float *gradient);

/* Makes one step with the calls that the case's `form` requires. */
onebit_status_t adam_make_step(const struct adam_case *what, onebit_optimizer_t optimizer, int rank,
                               int step);

/* Checks that the parameters equal `wanted`, rounded to their dtype. */
void learner_check_parameters(const struct adam_case *what, const struct adam_learner *learner,
                              const char *name, const float *wanted);

#endif
