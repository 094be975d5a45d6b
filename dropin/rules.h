/*
 * The rules by which an unmodified program's collectives are compressed or passed on. Rules are
 * lines of words, in a file or in the variable ONEBIT_RULES itself.
 *
 *   compress allreduce float bytes>=1M comm-size>=4    # the first rule that fits a call decides
 *   pass     allreduce count=1000
 *   compress reduce-scatter,allgather bytes>=4M
 *   least    64K                                       # minimum size if no rule fits
 *   warmup   20
 *   bits     4                                         # bits per element, if the rule has no bits=
 *                                                      # (or 1..8: as many as a tensor needs)
 *
 * A call that no rule fits is compressed if the user says that the sums are gradients
 * (ONEBIT_GRADIENTS=1). docs/preload.md explains every word. The module calls neither MPI nor
 * malloc.
 */
#ifndef OB_DROPIN_RULES_H
#define OB_DROPIN_RULES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/knobs.h"
#include "dropin/counters.h"
#include "onebit/plan.h"
#include "onebit/status.h"

/* The default of `least` with ONEBIT_GRADIENTS=1. At 1 Gbit/s compressed calls are faster from 8
 * KiB on. But most calls below 64 KiB carry numbers that a program needs exactly, and take little
 * of its time. */
#define OB_RULES_MIN_BYTES ((size_t)64 << 10)
/* The default of `warmup`: how many times a loop of calls is dense before it is compressed. */
#define OB_RULES_WARMUP 2

enum ob_rule_key { OB_RULE_BYTES, OB_RULE_COUNT, OB_RULE_COMM_SIZE, OB_RULE_KEYS };

/* A rule's condition on a number: it must be from `low` to `high`, both included, but not
 * `except`. */
struct ob_rule_range {
  uint64_t low, high;
  uint64_t except; /* only if `excepts` is true */
  bool excepts;
};

struct ob_rule {
  bool compress;
  struct ob_bits bits;         /* bits per element; 0: the bits of struct ob_rules */
  unsigned operations, dtypes; /* a bit for each onebit_operation_t and onebit_dtype_t */
  struct ob_rule_range range[OB_RULE_KEYS];
};

#define OB_MAX_RULES 64

struct ob_rules {
  struct ob_rule rule[OB_MAX_RULES];
  size_t rules;
  size_t min_bytes;    /* the minimum size of allreduces that no rule matches */
  unsigned warmup;     /* number of steps */
  struct ob_bits bits; /* bits if the matching rule sets none; 0: the value of ONEBIT_BITS */
  double budget;       /* ONEBIT_BUDGET; 0: none */
  bool gradients;      /* ONEBIT_GRADIENTS: calls that no rule matches are compressed */
};

/* Reads rules.
 *   name     the name of the text in error messages: a file's name
 *   text     `length` bytes, any
 *   rules    out; without meaning when the call fails
 * Errors: ONEBIT_ERROR_ARGUMENT, with name, line and word. */
onebit_status_t ob_rules_parse(const char *name, const char *text, size_t length,
                               struct ob_rules *rules);

/* Loads the rules of ONEBIT_RULES' value. NULL stands for the defaults. A value that begins with
 * the first word of a rule and a blank is the rules themselves. Any other value is the path of a
 * file. Errors: ONEBIT_ERROR_ARGUMENT as above, ONEBIT_ERROR_FILE. */
onebit_status_t ob_rules_load(const char *value, struct ob_rules *rules);

/* Applies the environment's variables to the rules: ONEBIT_GRADIENTS; ONEBIT_BUDGET, which sets
 * `bits` to 1 to 8; and ONEBIT_BITS, or `fallback`, if the rules have no `bits` line. Errors:
 * ONEBIT_ERROR_ARGUMENT. */
onebit_status_t ob_rules_apply_environment(int fallback, struct ob_rules *rules);

/* Returns a number that is equal on two ranks if their rules are equal. */
uint64_t ob_rules_hash(const struct ob_rules *rules);

/* Decides whether such a call is to be compressed. Returns OB_REASON_NONE, or the reason why
 * not. */
enum ob_reason ob_rules_judge(const struct ob_rules *rules, onebit_operation_t operation,
                              onebit_dtype_t dtype, size_t count, int comm_size);

/* Returns true if ONEBIT_GRADIENTS or a rule allows to compress some call. */
bool ob_rules_can_compress(const struct ob_rules *rules);

/* Returns the bits per element of a compressed call. */
struct ob_bits ob_rules_bits(const struct ob_rules *rules, onebit_operation_t operation,
                             onebit_dtype_t dtype, size_t count, int comm_size);

/* Returns true if a rule or a default gives some call a range of bits. */
bool ob_rules_have_bit_range(const struct ob_rules *rules);

/* Returns the smallest count with which a call of the operation can be compressed, with any type
 * and communicator. Returns SIZE_MAX if no call can be compressed. */
size_t ob_rules_min_count(const struct ob_rules *rules, onebit_operation_t operation);

#endif
