/* What the two halves of the doctor's judgement share. */
#ifndef TOOLS_TUNE_DOCTOR_JUDGE_H
#define TOOLS_TUNE_DOCTOR_JUDGE_H

#include "tools/doctor/doctor.h"

/* A finding to fill in, with empty texts; one that nobody reads when there are too many. */
struct doctor_finding *doctor_add(struct doctor_diagnosis *diagnosis, enum doctor_kind kind,
                                  int host);
/* host -1: of any. */
bool doctor_has(const struct doctor_diagnosis *diagnosis, enum doctor_kind kind, int host);

/* Appends, as far as there is room. */
void doctor_say(char *text, size_t room, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

void doctor_judge_interfaces(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis);
void doctor_judge_hosts(const struct doctor_facts *facts, struct doctor_diagnosis *diagnosis);

#endif
