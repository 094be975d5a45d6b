/*
 * This process and its machine: the clock, the processors, forks, and the files that are the
 * process's own.
 */
#ifndef OB_BASE_PROCESS_H
#define OB_BASE_PROCESS_H

#include <stdint.h>

/* Seconds since some moment in the past; never goes back. A call takes some 20 nanoseconds. */
double ob_seconds(void);

/* A number that all hosts served by one kernel share, as containers and emulated hosts may. From
 * the boot ID of Linux; 0: not known. */
uint64_t ob_machine_number(void);

/* The number of the machine's processors. */
int ob_machine_processors(void);

/* --- Files of this process alone ---------------------------------------------------------------*/

/* A process that is forked from this one has its files open too: as long as the child runs, the
 * system closes no connection of a parent that was killed, and gives up no lock of it. So a child
 * closes at once what is registered here, and what it has copied of objects of the parent is no use
 * to it. */

/* Registers an open file, and returns it; a negative number is only returned. */
int ob_own_file(int file);

/* Closes a registered file. A negative number is fine. */
void ob_own_close(int file);

/* The number of forks from the loading of the library to this process. An object that was made at
 * another number belongs to a parent process. */
unsigned ob_forks(void);

#endif
