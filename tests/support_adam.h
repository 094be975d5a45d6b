/*
 * Cases of 1-bit Adam; the functions that run one and compare it with the oracle are the same for
 * ranks that are threads and for ranks of MPI. Cases of other optimizers name their kind and run in
 * the same way.
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

/* The tensors of adam_tensors_odd have odd sizes; some are empty, one has a single element, some
 * have weight decay or their own rate. */
extern const struct adam_tensors adam_tensors_odd, adam_tensors_one, adam_tensors_many_words,
    adam_tensors_tiny, adam_tensors_none;

/* The form of a step: one call; or gradients become ready one by one, from the last tensor on, from
 * the first, or in an order that differs by rank and step; PARTLY: each rank reports only half of
 * them, and makes every third step in one call. */
enum adam_form { IN_ONE_CALL, BACKWARD, FORWARD, SHUFFLED, PARTLY, ADAM_FORMS };

struct optimizer_kind;

struct adam_case {
  const struct optimizer_kind *kind; /* NULL: 1-bit Adam */
  const void *more;                  /* NULL, or further options of that kind */
  int size, steps;
  int hosts;                     /* number of hosts, with equally many ranks; 0 is 1 */
  onebit_adam_options_t options; /* other kinds take the options of the same names; warmup_steps is
                                    freeze_step, and momentum is beta1 */
  const struct adam_tensors *tensors;
  enum adam_form form;
  bool still;   /* every 13th element never gets a gradient */
  int late;     /* when not 0: every 7th element, and all of the last tensor, gets its first
                   gradient in this step */
  float growth; /* when not 0: gradients are multiplied by growth^step */
  float poison; /* when not 0: before each step one is skipped, in which a gradient of poisoned_rank
                   has this value */
  int poisoned_rank, poisoned_from; /* poisoned_from: the first such step */
  float multiple; /* when not 0: arrays hold this multiple of the gradients, besides the loss scale;
                     see gradient_factor */
  size_t absent; /* when not 0: one in `absent` gradients, of a tensor and rank and step, is NULL */
  unsigned uncompressed; /* bit k: tensor k stays uncompressed */
  unsigned tables;       /* bit k: tensor k is a table */
  bool moving;           /* gradients are in another array every other step */
  const int *widths;     /* NULL, or the bits of the messages of each step. Then beta1 is 1/2
                            and there is no bias correction: products with levels are exact */
};

/* The oracle's state after each step. */
struct adam_run {
  const struct adam_case *what;
  struct adam_moment {
    float *parameters; /* of all tensors, one after the other: the master values */
    bool compressed;
    size_t freeze_step;
    double variance_ratio, gradient_norm;
    double before, after;                  /* the loss scale of this step and the next */
    double *momentum_norm, *residual_norm; /* [size]: norms of each rank's state */
  } * moments;                             /* [steps] */
  float *start;
  size_t total;
};

/* An optimizer: its row of the table of methods, and its oracle, which contains an oracle of 1-bit
 * Adam (`state`: tensors, exchanges, moments). */
struct optimizer_kind {
  const char *name; /* the name in its info */
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

/* Runs the case on one rank: the parameters must equal the oracle's after each step, to the bit.
 * This is a rank_body whose context is the struct adam_run. */
void adam_on_rank(onebit_comm_t comm, void *run);

/* Prepares the case and runs it on threads as its ranks, on its hosts. */
void adam_check(const struct adam_case *what);

/* Checks the case on groups of 1, 2, 3, 4 and 7 ranks, whatever its size, unless test_wanted thins
 * them. */
void adam_check_on_groups(struct adam_case what);

/* Checks the case with every codec of this machine, and one to three threads each. */
void adam_check_codecs(struct adam_case what);

/* Fills the gradient of all tensors on a rank at a step; the other function returns the learning
 * rate of a step. */
void adam_gradient(const struct adam_case *what, float *gradient, size_t total, int rank, int step);
float adam_learning_rate(int step);

/* Return the sum of squares; true if a norm is the wanted one but for the order of additions. */
double square_sum(const float *values, size_t count);
bool is_close(double actual, double wanted);

/* The optimizer's arrays of one rank, of the case's types; `values` holds gradients as float32. */
struct adam_learner {
  char *parameters, *gradients[2];
  float *values;
  onebit_tensor_t tensors[10];
  size_t first[10], total;
};

/* Makes them; the parameters are the same on all ranks. */
struct adam_learner learner_make(const struct adam_case *what);
void learner_free(struct adam_learner *learner);

/* Write the gradients of a step to their array, and give the optimizer its address if it may
 * change; and compute these gradients as the oracle takes them. */
void learner_set_gradients(const struct adam_case *what, struct adam_learner *learner,
                           onebit_optimizer_t optimizer, int rank, int step);
void learner_oracle_gradient(const struct adam_case *what, const struct adam_learner *learner,
                             double loss_scale, int rank, int step, float *gradient);

/* Makes one step in the case's form. */
onebit_status_t adam_make_step(const struct adam_case *what, onebit_optimizer_t optimizer, int rank,
                               int step);

/* Checks that the parameters are the wanted ones, rounded to their type. */
void learner_check_parameters(const struct adam_case *what, const struct adam_learner *learner,
                              const char *name, const float *wanted);

#endif
