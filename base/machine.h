/* The machine that a process runs on, whatever the name of its host. */
#ifndef OB_BASE_MACHINE_H
#define OB_BASE_MACHINE_H

#include <stdint.h>

/* A number that all hosts served by one kernel share, as containers and emulated hosts may. From
 * the boot ID of Linux; 0: not known. */
uint64_t ob_machine_number(void);

/* The number of the machine's processors. */
int ob_machine_processors(void);

#endif
