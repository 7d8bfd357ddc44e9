from trainmedic_core.command import main

if __name__ == "__main__":
    main(prog_name="trainmedic")
