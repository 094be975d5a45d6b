/* The numbers of a tuning file: where each belongs, and what is sane. */
#ifndef OB_COLLECTIVES_TUNING_KEYS_H
#define OB_COLLECTIVES_TUNING_KEYS_H

#include "collectives/cost/cost.h"

struct ob_tuning_key {
  const char *name;
  size_t offset; /* of a double in struct ob_costs */
  double low, high;
  const char *meaning; /* with the unit */
};

enum { OB_TUNING_KEYS = 29 };
extern const struct ob_tuning_key ob_tuning_keys[OB_TUNING_KEYS];

#endif
