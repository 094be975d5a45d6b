/* The machine that a process runs on, whatever the name of its host. */
#ifndef OB_BASE_MACHINE_H
#define OB_BASE_MACHINE_H

#include <stdint.h>

/* The same for all hosts that are served by one kernel, as containers and emulated hosts may be.
 * By the boot ID of Linux; 0: not known. */
uint64_t ob_machine_number(void);

/* Its processors, all together. */
int ob_machine_processors(void);

#endif
