from fairwind.cli import main

main()
