/*
 * Cases of 1-bit Adam. The functions that run a case and compare it with the oracle are the same
 * for ranks that are threads and for ranks of MPI. Cases of other optimizers name their kind and
 * run in the same way.
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

/* The form of a step. In one call; or with gradients that become ready one by one, from the last
 * tensor on (BACKWARD), from the first (FORWARD), or in an order that differs by rank and step
 * (SHUFFLED). PARTLY: each rank reports only half of the gradients as ready, and makes every third
 * step in one call. */
enum adam_form { IN_ONE_CALL, BACKWARD, FORWARD, SHUFFLED, PARTLY, ADAM_FORMS };

struct optimizer_kind;

struct adam_case {
  const struct optimizer_kind *kind; /* NULL: 1-bit Adam */
  const void *more;                  /* NULL, or further options of that kind */
  int size, steps;
  int hosts;                     /* number of hosts, with equally many ranks; 0 is 1 */
  onebit_adam_options_t options; /* other kinds use the options of the same names; warmup_steps is
                                  * freeze_step, and momentum is beta1 */
  const struct adam_tensors *tensors;
  enum adam_form form;
  bool still;   /* every 13th element never gets a gradient */
  int late;     /* if not 0: every 7th element, and all elements of the last tensor, get
                 * their first gradient in this step */
  float growth; /* if not 0: gradients are multiplied by growth^step */
  float poison; /* if not 0: a skipped step precedes each step; in the skipped one a
                 * gradient of poisoned_rank has this value */
  int poisoned_rank, poisoned_from; /* poisoned_from: the first step that a skipped one precedes */
  float multiple; /* if not 0: arrays contain the gradients times this number, besides the loss
                   * scale; see gradient_factor */
  size_t absent;  /* if not 0: one in `absent` gradients is NULL, by tensor, rank and step */
  unsigned uncompressed; /* bit k: tensor k stays uncompressed */
  unsigned tables;       /* bit k: tensor k is a table */
  bool moving;           /* gradients are in another array in every second step */
  const int *widths;     /* NULL, or the bits of each step's messages. With them beta1 is 1/2 and
                          * there is no bias correction: products with levels are exact */
};

/* The oracle's state after each step. */
struct adam_run {
  const struct adam_case *what;
  struct adam_moment {
    float *parameters; /* of all tensors, one after the other: the master values */
    bool compressed;
    size_t freeze_step;
    double variance_ratio, gradient_norm;
    double before, after;                  /* the loss scale of this step, and of the next */
    double *momentum_norm, *residual_norm; /* [size]: norms of each rank's state */
  } * moments;                             /* [steps] */
  float *start;
  size_t total;
};

/* An optimizer: its row in the table of methods, and its oracle. The oracle contains an oracle of
 * 1-bit Adam, `state`, with the tensors, exchanges and moments. */
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

/* Runs the case on one rank. After each step the parameters must equal the oracle's to the bit.
 * This is a rank_body whose context is the struct adam_run. */
void adam_on_rank(onebit_comm_t comm, void *run);

/* Prepares the case and runs it with threads as ranks, on the hosts of the case. */
void adam_check(const struct adam_case *what);

/* Checks the case on groups of 1, 2, 3, 4 and 7 ranks, whatever its `size` is. test_wanted may
 * leave out some of the groups. */
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

/* The optimizer's arrays of one rank, of the case's dtypes. `values` has the gradients as
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

/* learner_set_gradients writes the gradients of a step to their array, and gives the optimizer the
 * array's address if it may change. learner_oracle_gradient computes these gradients in the form
 * that the oracle needs. */
void learner_set_gradients(const struct adam_case *what, struct adam_learner *learner,
                           onebit_optimizer_t optimizer, int rank, int step);
void learner_oracle_gradient(const struct adam_case *what, const struct adam_learner *learner,
                             double loss_scale, int rank, int step, float *gradient);

/* Makes one step in the case's form. */
onebit_status_t adam_make_step(const struct adam_case *what, onebit_optimizer_t optimizer, int rank,
                               int step);

/* Checks that the parameters equal `wanted`, rounded to their dtype. */
void learner_check_parameters(const struct adam_case *what, const struct adam_learner *learner,
                              const char *name, const float *wanted);

#endif
