/* Finds the job of a rank. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "base/knobs.h"
#include "collectives/transports/sockets_rendezvous.h"

/* Job numbers that launchers set. `part` tells jobs with one number apart: a step of an allocation.
 * `exact`: no two jobs have the same. A launcher comes before the one that started it. */
static const struct launcher {
  const char *number, *part;
  bool exact;
} launchers[] = {
    {"TORCHELASTIC_RUN_ID", NULL, true},
    {"PMIX_NAMESPACE", NULL, true},
    {"OMPI_MCA_ess_base_jobid", NULL, true},
    {"PALS_APID", NULL, true},
    {"FLUX_JOB_ID", NULL, true},
    {"SLURM_JOB_ID", "SLURM_STEP_ID", false},
    {"PBS_JOBID", NULL, false},
    {"LSB_JOBID", NULL, false},
};

/* Returns NULL if the variable has no job number. torchrun without an id writes "none". */
static const char *sockets_job_value_of(const char *name) {
  const char *text = name ? getenv(name) : NULL;
  return text && *text && strcmp(text, "none") != 0 ? text : NULL;
}

static void set_job(struct ob_job *job, const char *named, const char *number, const char *part,
                    bool exact) {
  *job = (struct ob_job){.exact = exact};
  snprintf(job->named, sizeof job->named, "%s", named);
  job->hash[0] = ob_hash(OB_HASH_START, named, strlen(named) + 1);
  job->hash[0] = ob_hash(job->hash[0], number, strlen(number) + 1);
  job->hash[0] = ob_hash(job->hash[0], part, strlen(part));
  job->hash[1] = ob_hash(~job->hash[0], number, strlen(number));
}

void ob_job_find(const char *secret, struct ob_job *job) {
  const char *own = ob_knob_text(OB_KNOB_JOB);
  if (secret || own) {
    set_job(job, secret ? "options->secret" : "ONEBIT_JOB", secret ? secret : own, "", true);
    return;
  }
  for (size_t k = 0; k < sizeof launchers / sizeof launchers[0]; k++) {
    const struct launcher *launcher = &launchers[k];
    const char *number = sockets_job_value_of(launcher->number),
               *part = sockets_job_value_of(launcher->part);
    if (!number)
      continue;
    set_job(job, launcher->number, number, part ? part : "", launcher->exact || part);
    return;
  }
  set_job(job, "", "", "", false);
}

void ob_job_prove(const struct ob_job *job, const uint64_t nonce[2], uint64_t proof[2]) {
  const uint64_t both[4] = {job->hash[0], job->hash[1], nonce[0], nonce[1]};
  proof[0] = ob_hash(OB_HASH_START, both, sizeof both);
  proof[1] = ob_hash(~proof[0], both, sizeof both);
}
