/* Writing a tuning file. */
#include <string.h>

#include "collectives/cost/tuning.h"
#include "collectives/cost/tuning_keys.h"
#include "collectives/cost/tuning_points.h"

bool ob_tuning_write(FILE *file, const struct ob_costs *costs,
                     const struct ob_tuning_origin *origin) {
  fprintf(file, "onebit tuning %d\n", OB_TUNING_VERSION);
  fprintf(file, "# Written by onebit-tune; ONEBIT_TUNING names another file, or none.\n");
  fprintf(file, "date %s\nmpi %s\ncodec %s\n", origin->date, origin->mpi, costs->codec);
  for (size_t k = 0; k < origin->host_count; k++)
    fprintf(file, "host %s\n", origin->hosts[k]);
  for (size_t k = 0; k < OB_TUNING_KEYS; k++) {
    double value;
    memcpy(&value, (const char *)costs + ob_tuning_keys[k].offset, sizeof value);
    fprintf(file, "%s %.8e # %s\n", ob_tuning_keys[k].name, value, ob_tuning_keys[k].meaning);
  }
  ob_tuning_write_points(file, &costs->measured);
  return fflush(file) == 0 && !ferror(file);
}
